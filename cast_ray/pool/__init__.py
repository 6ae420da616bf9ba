"""Engine actors on Ray: start them, route rows to them, survive their deaths. Knows nothing of datasets."""
