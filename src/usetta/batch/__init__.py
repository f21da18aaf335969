"""Any number of images, from wherever they lie, to predictions in Parquet files."""
