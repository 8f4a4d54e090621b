"""What crosses between server and model, without torch: chunks, sampling, block tables, cache sizes."""
