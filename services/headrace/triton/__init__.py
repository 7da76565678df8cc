"""Triton as a process and as a peer: launching it and speaking the engine contract."""
