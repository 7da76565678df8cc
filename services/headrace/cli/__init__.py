"""The headrace command.

main        the group of commands, and how every failure becomes one sentence and an exit code
serve       `router`, `scheduler`, `registry`: one service in this process
up, demo    the whole stack on this machine: `stack` plans it, `parts` runs its processes
status, generate, model    clients of a running stack, found through `places`
"""
