"""The commands of ``gemserve``. Nothing here imports torch."""
