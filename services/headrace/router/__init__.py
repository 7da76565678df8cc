"""The Router: the client's edge, one session a request."""
