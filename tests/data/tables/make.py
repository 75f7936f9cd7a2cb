"""Writes the files beside it by the tools that people have: python make.py <folder>.

Made with pandas 3.1.1, polars 2.1.0, duckdb 2.0.1, dask 2026.8.0, pyarrow 26.0.1, pyspark 4.3.0 and Java 17.
Each holds the rows of ROWS, in this order or sorted by `band`: a = n + 0.5, b = 10 n, y = n % 3, band = n % 2.
"""

from __future__ import annotations

import sys
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

N = 8
ROWS = {
    "a": [n + 0.5 for n in range(N)],
    "b": [10 * n for n in range(N)],
    "y": [n % 3 for n in range(N)],
    "band": [n % 2 for n in range(N)],
}


def by_pandas(out: Path) -> None:
    """Write frames with each kind of index, and each kind of column."""
    frame, keys = pd.DataFrame(ROWS), [1000 * (3 * n % N) for n in range(N)]
    frame.to_parquet(out / "pandas-range.parquet")
    frame.set_index(pd.RangeIndex(100, 100 + N, name="row")).to_parquet(out / "pandas-range-kept.parquet", index=True)
    frame.set_index(pd.Index(keys)).to_parquet(out / "pandas-unnamed.parquet")
    frame.set_index(pd.Index(keys, name="id")).to_parquet(out / "pandas-named.parquet")
    two = pd.MultiIndex.from_arrays([list("ppppqqqq"), keys], names=["patient", "visit"])
    frame.set_index(two).to_parquet(out / "pandas-multi.parquet")
    frame.astype({"a": "Float64", "b": "Int64", "y": "Int8", "band": "category"}).to_parquet(
        out / "pandas-types.parquet"
    )
    frame.to_parquet(out / "pandas-hive", partition_cols=["band"])


def by_polars(out: Path) -> None:
    """Write a frame, one in partitions, and one that came from pandas with its index."""
    frame = pl.DataFrame(ROWS)
    frame.write_parquet(out / "polars.parquet")
    frame.write_parquet(pl.PartitionBy(out / "polars-hive", key="band"), mkdir=True)
    pl.read_parquet(out / "pandas-unnamed.parquet").write_parquet(out / "polars-of-pandas.parquet")


def by_duckdb(out: Path) -> None:
    """Write a table, one with decimals, and one in partitions."""
    frame = pd.DataFrame(ROWS)
    duckdb.sql(f"COPY frame TO '{out}/duckdb.parquet'")
    decimals = "SELECT a::DECIMAL(8, 2) AS a, b::UBIGINT AS b, y::UTINYINT AS y, band::INTEGER AS band FROM frame"
    duckdb.sql(f"COPY ({decimals}) TO '{out}/duckdb-decimals.parquet'")
    duckdb.sql(f"COPY frame TO '{out}/duckdb-hive' (FORMAT parquet, PARTITION_BY (band))")
    del frame


def by_dask(out: Path) -> None:
    """Write a folder of two parts, with an index as Dask names it."""
    import dask
    import dask.dataframe as dd

    dask.config.set(scheduler="synchronous")
    dd.from_pandas(pd.DataFrame(ROWS), npartitions=2).to_parquet(out / "dask.parquet", write_metadata_file=True)


def by_pyarrow(out: Path) -> None:
    """Write partitions, and vectors."""
    table = pa.table(ROWS)
    pq.write_to_dataset(table, out / "pyarrow-hive", partition_cols=["band"], basename_template="part-{i}.parquet")
    vectors = pa.array([[n + 0.5, 10.0 * n] for n in range(N)], pa.list_(pa.float32()))
    labels = {"y": ROWS["y"], "band": ROWS["band"]}
    pq.write_table(pa.table({"v": vectors, **labels}), out / "pyarrow-lists.parquet")
    fixed = vectors.cast(pa.list_(pa.float32(), 2))
    pq.write_table(pa.table({"v": fixed, **labels}), out / "pyarrow-vectors.parquet")


def by_spark(out: Path) -> None:
    """Write folders as Spark leaves them, also in partitions."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    frame = spark.createDataFrame(list(zip(*ROWS.values(), strict=True)), list(ROWS)).repartition(2)
    frame.write.parquet(str(out / "spark.parquet"))
    frame.write.partitionBy("band").parquet(str(out / "spark-hive"))
    spark.stop()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for write in (by_pandas, by_polars, by_duckdb, by_dask, by_pyarrow, by_spark):
        write(folder)
