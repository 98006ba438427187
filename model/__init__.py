"""A decoder-only Transformer written from its parts, its loss and its sampling."""
