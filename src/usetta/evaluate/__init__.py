"""Measuring methods on data sets."""
