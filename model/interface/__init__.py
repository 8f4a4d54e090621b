"""What crosses between server and model: chunks, sampling parameters, block tables, sizes of the cache,
errors. No torch."""
