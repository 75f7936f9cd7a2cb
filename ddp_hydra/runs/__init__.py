"""Finds the runs below folders and URLs, and reads what they have left.

All text of a run is untrusted: files are read up to a limit, never unpickled, and links are not followed.
"""
