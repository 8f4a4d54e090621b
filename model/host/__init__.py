"""What the machine offers: processor features, memory, huge pages, the cache on disk, torch's libraries."""
