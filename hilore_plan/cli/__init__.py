"""The command line: `hilore profile | plan | apply | show | bench`.

Takes what a person typed, gives files, tables and exit codes. The only room that knows typer, rich and matplotlib, and
the last word on errors. One module per command; what a command needs is imported when it runs, so that `--help` is
immediate. May import every room.
"""
