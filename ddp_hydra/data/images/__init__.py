"""Labelled images: the parts that all image data sets share."""
