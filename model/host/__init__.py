"""What the machine offers: processor features, memory, huge pages, cache folder, locks, torch's libraries."""
