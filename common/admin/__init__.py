"""The admin port of every service, and the command line that talks to it."""
