"""What steps and kernels cost against what the machine allows; for development."""
