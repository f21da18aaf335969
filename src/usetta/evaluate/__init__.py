"""Measuring methods on datasets."""
