"""One model on several devices of a machine: tensor parallelism, applied to the network from outside."""
