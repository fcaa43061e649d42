"""Developer tools that train the demo model, a few million parameters, on text that they generate.

The trained model itself is `common/model/demo_model`; serving reads only that folder.
"""
