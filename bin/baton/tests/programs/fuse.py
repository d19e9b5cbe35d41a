"""A FUSE file, mounted at a path, whose server does not answer some operations: their numbers follow the path. Prints a line when it is
mounted, and one for each request that it does not answer. When its input ends all who wait get an error.

What the file is (GETATTR) everybody has to ask to open it; if that is among them only agents and keepers get no answer."""

import ctypes
import os
import struct
import sys
import threading

FORGET, GETATTR, OPEN, INIT = 2, 3, 14, 26
path, unanswered = sys.argv[1], {int(number) for number in sys.argv[2:]}
libc = ctypes.CDLL(None, use_errno=True)
try:
    server = os.open("/dev/fuse", os.O_RDWR)
except OSError as error:
    sys.exit(f"/dev/fuse: {error}")
options = f"fd={server},rootmode=100000,user_id=0,group_id=0,allow_other"
if libc.mount(b"fuse", path.encode(), b"fuse", 0, options.encode()) != 0:
    sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")


def ends():
    sys.stdin.buffer.read()
    # The descriptor is closed, which ends the file system.
    os._exit(0)


def is_of_baton(thread):
    """Whether a thread is one of an agent or a keeper."""
    try:
        with open(f"/proc/{thread}/status") as status:
            process = next(line.split()[1] for line in status if line.startswith("Tgid:"))
        with open(f"/proc/{process}/comm") as name:
            return name.read() in ("baton-agent\n", "baton-keeper\n")
    except OSError:
        return False


def body(operation):
    if operation == INIT:
        return struct.pack("7I", 7, 31, 0, 0, 0, 4096, 1) + bytes(36)
    if operation == GETATTR:
        # A regular file with number 1, of a megabyte. The kernel need not ask again for as many seconds.
        fit = 0 if GETATTR in unanswered else 1 << 30
        return struct.pack("QII", fit, 0, 0) + struct.pack("QQ", 1, 1 << 20) + bytes(44) + struct.pack("II", 0o100777, 1) + bytes(20)
    return bytes(16) if operation == OPEN else b""


threading.Thread(target=ends).start()
print("mounted", flush=True)
while True:
    request = os.read(server, 1 << 17)
    _, operation, number, _, _, _, thread = struct.unpack_from("IIQQIII", request)
    if operation in unanswered and (operation != GETATTR or is_of_baton(thread)):
        print("unanswered", flush=True)
    elif operation != FORGET:
        answer = body(operation)
        try:
            os.write(server, struct.pack("IiQ", 16 + len(answer), 0, number) + answer)
        except OSError:
            # Whoever has asked was interrupted.
            pass
