"""Batch generation on Ray Data: rows in, rows with outputs out. Knows nothing of how an engine decodes."""
