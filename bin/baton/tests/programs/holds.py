"""Opens a file as descriptor 3, becomes a user, and executes a program: `holds.py FILE USER PROGRAM [ARGUMENT]…`. No descriptor of the file
is ever closed, which may wait for its server."""

import os
import sys

path, user, program, *arguments = sys.argv[1:]
executable = os.open(program, os.O_RDONLY)
if executable == 3:
    executable = os.dup(executable)
    os.close(3)
file = os.open(path, os.O_RDONLY)
assert file == 3, file
os.set_inheritable(file, True)
if user != "0":
    os.setuid(int(user))
os.execve(executable, [program, *arguments], os.environ)
