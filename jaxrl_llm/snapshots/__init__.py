"""Snapshots: versioned, checked, asynchronous saves of everything that a run needs to go on."""
