"""A FUSE file, mounted at a path, whose server does not answer some operations: their numbers follow the path. Prints a line when it is
mounted, and one for each request that it does not answer. When its input ends all who wait get an error."""

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


def body(operation):
    if operation == INIT:
        return struct.pack("7I", 7, 31, 0, 0, 0, 4096, 1) + bytes(36)
    if operation == GETATTR:
        # Fit for ever: a regular file with number 1, of a megabyte.
        return struct.pack("QII", 1 << 30, 0, 0) + struct.pack("QQ", 1, 1 << 20) + bytes(44) + struct.pack("II", 0o100777, 1) + bytes(20)
    return bytes(16) if operation == OPEN else b""


threading.Thread(target=ends).start()
print("mounted", flush=True)
while True:
    request = os.read(server, 1 << 17)
    _, operation, number = struct.unpack_from("IIQ", request)
    if operation in unanswered:
        print("unanswered", flush=True)
    elif operation != FORGET:
        answer = body(operation)
        try:
            os.write(server, struct.pack("IiQ", 16 + len(answer), 0, number) + answer)
        except OSError:
            # Whoever has asked was interrupted.
            pass
