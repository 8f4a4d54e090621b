"""HTTP beneath the routes: the protocol, middlewares, keys, deadlines, errors as answers."""
