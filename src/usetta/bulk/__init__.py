"""Any number of pictures, from wherever they lie, to predictions in Parquet files."""
