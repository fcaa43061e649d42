"""Attention backends. A kind of attention begins in `common.model.attention`; `common.attention.choose` names its backends."""
