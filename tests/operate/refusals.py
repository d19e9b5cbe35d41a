"""What a person meets who lacks something: what is said has to name the cause and what to type; and nothing may be left of the try."""

from container import step, wait_until
from web import Client, on_nic

# Each is tried as a unit of its own, while the service is down: its settings, the command, its exit status, what it says.
DENIED = "/run/denied/agent.sock"
OWN = ["RuntimeDirectory=denied"]
ORDINARY = ["User=www-data"]
NO_BPF = ["CapabilityBoundingSet=~CAP_BPF CAP_SYS_ADMIN"]
SECURITY_MODULE = ["SystemCallFilter=~bpf", "SystemCallErrorNumber=EACCES"]
NO_TUN = ["InaccessiblePaths=/dev/net"]
NO_PACKETS = ["RestrictAddressFamilies=~AF_PACKET"]
UP = ["baton", "up", "--socket", DENIED]
RUN = ["baton", "run", "--", "true"]
TRIES = [
    (ORDINARY, ["baton", "up"], 2, ["/run/baton/agent.sock", "`baton up` needs root"]),
    (ORDINARY, RUN, 2, ["starting a Baton", "run as root", "CAP_BPF"]),
    (ORDINARY, ["baton", "run", "--if-up", "--", "echo", "started"], 0, ["runs without Baton: none is up", "started"]),
    (ORDINARY, ["baton", "attach", "1"], 2, ["run as root"]),
    (ORDINARY, ["baton", "enable", "nginx"], 2, ["writing /etc/systemd/system/nginx.service.d/50-baton.conf", "it needs root"]),
    (ORDINARY, ["baton", "disable", "nginx"], 2, ["removing /etc/systemd/system/nginx.service.d/50-baton.conf", "it needs root"]),
    (NO_BPF + OWN, UP, 2, ["starting a Baton", "no right to load BPF programs", "CAP_BPF"]),
    (SECURITY_MODULE + OWN, UP, 2, ["a security module", "journalctl -k"]),
    (SECURITY_MODULE, RUN, 2, ["a security module", "journalctl -k"]),
    (NO_TUN + OWN, UP, 2, ["there is no /dev/net/tun", "modprobe tun", "--device /dev/net/tun"]),
    (NO_TUN, RUN, 2, ["there is no /dev/net/tun", "modprobe tun", "--device /dev/net/tun"]),
    (NO_PACKETS + OWN, UP, 2, ["AF_PACKET (CAP_NET_RAW)"]),
    ([], ["baton", "status"], 3, ["no Baton is up", "systemctl start baton"]),
    ([], ["baton", "ls"], 2, ["no Baton runs here", "baton up"]),
    ([], ["baton", "stats"], 2, ["no Baton runs here", "baton up"]),
    ([], ["baton", "move", "nic", "all"], 2, ["no Baton runs here", "baton up"]),
    ([], ["baton", "enable", "sshd.socket"], 2, ["a socket starts no program"]),
    # Each of doctor's lines about something that is missing is followed by what to do.
    (["CapabilityBoundingSet="], ["baton", "doctor"], 1, ["MISSING", "run as root"]),
    (NO_TUN, ["baton", "doctor"], 1, ["MISSING  /dev/net/tun", "modprobe tun"]),
    (SECURITY_MODULE, ["baton", "doctor"], 1, ["MISSING  BPF programs", "a security module"]),
    (NO_PACKETS, ["baton", "doctor"], 1, ["MISSING  packet sockets", "a unit must allow AF_PACKET"]),
    (["RestrictAddressFamilies=~AF_NETLINK"], ["baton", "doctor"], 1, ["MISSING"]),
]

# A server that systemd starts with its listener, one connection after another.
ECHO = """
open(my $listener, "+<&=", 3) or die "no listener: $!";
while (accept(my $client, $listener)) {
    while (sysread($client, my $data, 65536)) { syswrite($client, $data); }
    close($client);
}
"""
ACTIVATED = """[Service]
ExecStart=/usr/bin/perl /srv/echo.pl
User=www-data
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
SystemCallFilter=@system-service
"""
TO_ECHO = """
import socket, sys
peer = socket.create_connection(("127.0.0.1", 7070), 60)
for line in sys.stdin:
    for _ in range(int(line)):
        peer.sendall(b"x" * 1000)
        assert len(peer.recv(1000, socket.MSG_WAITALL)) == 1000
    print(peer.getsockname()[1], flush=True)
"""


def tried(system, settings, command):
    """Runs a command as a unit with these settings. Returns its status and what it said."""
    properties = [f"--property={setting}" for setting in settings]
    return system.run("systemd-run", "--quiet", "--wait", "--pipe", "--collect", *properties, "--", *command, check=False)


def meet(system):
    step("what a person meets who lacks something")
    system.says("systemctl", "stop", "baton")
    system.says("systemctl", "mask", "--runtime", "baton")
    for settings, command, status, texts in TRIES:
        got, said = tried(system, settings, command)
        missing = [text for text in texts if text not in said]
        assert (got, missing) == (status, []), f"{settings} {command}: {got}, without {missing}:\n{said}"
        lines = said.splitlines()
        # An error is one line; what clap says of a wrong argument has more.
        assert status != 2 or len(lines) == 1 or lines[0].startswith("error: "), said
        assert "panicked" not in said, said
        for number, line in enumerate(lines):
            assert not line.startswith("MISSING") or lines[number + 1].startswith("         "), said
    print(f"  {len(TRIES)} commands say what is missing")
    full_disk(system)
    system.says("systemctl", "unmask", "--runtime", "baton")
    system.says("systemctl", "start", "baton")


def full_disk(system):
    units = "/etc/systemd/system"
    system.says("sh", "-ec", f"printf '[Service]\\nExecStart=/bin/sleep 1000\\n' > {units}/full.service; mkdir {units}/full.service.d")
    system.says("mount", "-t", "tmpfs", "-o", "size=4k", "none", f"{units}/full.service.d")
    system.says("systemctl", "daemon-reload")
    system.says("sh", "-c", f"head -c 4096 /dev/zero > {units}/full.service.d/fill")
    status, said = system.run("baton", "enable", "full", check=False)
    assert status == 2 and "No space left on device" in said and "df -h" in said and "needs root" not in said, said
    # Half of a drop-in would be a unit without a program.
    assert system.says("ls", f"{units}/full.service.d") == "fill"
    status, said = system.run("baton", "report", "-o", f"{units}/full.service.d/report.tar.gz", check=False)
    assert status == 2 and "No space left on device" in said and "report.tar.gz" in said, said
    system.says("umount", f"{units}/full.service.d")
    system.says("rm", "-r", f"{units}/full.service.d", f"{units}/full.service")
    system.says("systemctl", "daemon-reload")
    print("  a full disk is said, and leaves no half of a file")


def activated(system):
    step("a socket-activated unit of an ordinary user, with filters of system calls and of address families")
    units = system.root / "etc/systemd/system"
    (system.root / "srv/echo.pl").write_text(ECHO)
    (units / "activated.service").write_text(ACTIVATED)
    (units / "activated.socket").write_text("[Socket]\nListenStream=127.0.0.1:7070\n")
    system.says("systemctl", "daemon-reload")
    said = system.says("baton", "enable", "activated", "--", "--rule", "accepted", "--eager")
    assert "SystemCallFilter=" in said, said
    system.says("systemctl", "start", "activated.socket")
    client = Client(system, TO_ECHO)
    port = client.ask()
    wait_until("its connection is on the NIC", lambda: client.ask() and port in on_nic(system))
    client.end()
    system.says("baton", "disable", "activated")
    system.says("systemctl", "stop", "activated.socket", "activated.service")
    for path in (units / "activated.service", units / "activated.socket", system.root / "srv/echo.pl"):
        path.unlink()
    system.says("systemctl", "daemon-reload")

