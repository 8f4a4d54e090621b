"""What the machine offers: features of its processor, memory, huge pages, the cache folder, locks; and how
torch is imported."""
