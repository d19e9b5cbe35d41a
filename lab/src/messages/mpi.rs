//! An MPI program over RMPP's libfabric provider, and over Open MPI's own TCP on the same link.

use super::bed::{Conditions, Offload};
use anyhow::{Context, Result, bail};
use baton_bed::testbed::{Testbed, TestbedSettings, use_loss_based};
use baton_linux::namespace::Namespace;
use baton_linux::process;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The program of the ranks.
const SOURCE: &str = include_str!("mpi.c");
/// Hosts' addresses: those of a test bed.
const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];
/// Packets that a CTS of the paper's protocol clears.
const GRANT: u16 = 16;
/// Seconds after which a job is ended.
const LIMIT: &str = "120";

/// What an MPI program's messages go by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Carrier {
    /// Open MPI's own TCP (btl tcp).
    Tcp,
    /// The provider, with the data half in the program: long messages by a stream.
    RmppHost,
    /// The same, with all messages in packets over UDP.
    RmppPackets,
    /// The provider, with the data half on host A's NIC.
    RmppNic,
    /// The same with the paper's protocol: each CTS is the host's and clears 16 packets. The data half as far as this
    /// says on host A's NIC, the RSM sent so many packets early.
    Paper(Offload, u8),
}

impl Carrier {
    /// What carries the data of long messages.
    pub fn encapsulation(self) -> &'static str {
        match self {
            Carrier::Tcp => "tcp",
            Carrier::RmppHost => "stream",
            Carrier::RmppPackets | Carrier::RmppNic | Carrier::Paper(..) => "udp",
        }
    }

    /// Whether a part of the data half is on a NIC.
    fn on_nic(self) -> bool {
        matches!(self, Carrier::RmppNic | Carrier::Paper(Offload::Receive | Offload::Both, _))
    }

    /// The provider's settings.
    fn settings(self) -> Vec<(&'static str, String)> {
        let mut settings = vec![
            ("FI_RMPP_NIC", if self.on_nic() { "auto" } else { "never" }.to_owned()),
            ("FI_RMPP_STREAM", if self == Carrier::RmppHost { "yes" } else { "no" }.to_owned()),
        ];
        if let Carrier::Paper(offload, early) = self {
            let halves = if offload == Offload::Receive { "receive" } else { "both" };
            settings.extend([("FI_RMPP_HALVES", halves.to_owned()), ("FI_RMPP_GRANT", GRANT.to_string())]);
            settings.extend([("FI_RMPP_AHEAD", "0".to_owned()), ("FI_RMPP_EARLY", early.to_string())]);
        }
        settings
    }
}

/// One job of two ranks.
#[derive(Clone, Debug, Serialize)]
pub struct MpiCell {
    /// What the messages went by.
    pub carrier: Carrier,
    /// What carries the data of long messages: [`Carrier::encapsulation`].
    pub encapsulation: &'static str,
    /// Whether a NIC stands between host A's kernel and the link; else the link is between two kernels.
    pub nic: bool,
    /// Bytes of a message.
    pub size: u32,
    /// Half a round trip in microseconds, the median.
    pub median_us: f64,
    /// The shortest half of a round trip in microseconds.
    pub least_us: f64,
    /// The mean.
    pub mean_us: f64,
    /// The longest.
    pub most_us: f64,
    /// Megabytes per second, from the median.
    pub mb_per_s: f64,
    /// Milliseconds of host A's CPU per megabyte: rank 0's process beside its work, and with a NIC its kernel's
    /// receiving.
    pub host_cpu_ms_per_mb: f64,
    /// The kernel's and the agent's part of it.
    pub kernel_cpu_ms_per_mb: f64,
    /// Milliseconds of the NIC's CPU per megabyte.
    pub nic_cpu_ms_per_mb: f64,
    /// Share of host A's CPU that was rank 0's work: the rest went to its messages. None without work.
    pub availability: Option<f64>,
}

/// What rank 0 prints.
#[derive(Deserialize)]
struct Printed {
    median_us: f64,
    least_us: f64,
    mean_us: f64,
    most_us: f64,
    mb_per_s: f64,
    cpu_ms_per_mb: f64,
    work_ms_per_mb: f64,
    wrong: u32,
}

/// Messages of a job: their size, how many round trips, and microseconds of work between polls (0: rank 0 only waits).
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub size: u32,
    pub rounds: u32,
    pub work: u32,
}

/// A process that holds a namespace open, so that others can be started in it. It ends with this one, however that
/// ends, and removes a folder then.
struct Anchor(Child);

impl Anchor {
    fn new(host: &Namespace, folder: &Path) -> Result<Anchor> {
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' INT TERM HUP; read -r _; rm -rf \"$1\"", "sh"]).arg(folder).stdin(Stdio::piped());
        Ok(Anchor(host.spawn(&mut command)?))
    }
}

impl Drop for Anchor {
    fn drop(&mut self) {
        self.0.stdin.take();
        // It has nothing to say at its end.
        let _ = self.0.wait();
    }
}

/// Two hosts with the program, and what MPI's launcher needs to start it there.
pub struct MpiHosts {
    folder: PathBuf,
    _anchors: [Anchor; 2],
    hosts: Hosts,
    provider: PathBuf,
    napi: Vec<u32>,
}

enum Hosts {
    /// A link between two kernels.
    Plain(Namespace),
    /// A NIC on host A.
    WithNic(Box<Testbed>),
}

fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("starting {}", command.get_program().display()))?;
    if !status.success() {
        bail!("{command:?} failed");
    }
    Ok(())
}

/// The folder of the provider: where `make provider` puts it.
fn provider() -> Result<PathBuf> {
    let folder = std::env::current_exe()?.parent().unwrap_or(Path::new("/")).join("../provider");
    if let Some(missing) = ["librmpp-fi.so", "librmpp-memory.so"].into_iter().find(|name| !folder.join(name).exists()) {
        bail!("{missing} is not in {}: `make provider` builds it", folder.display());
    }
    Ok(folder.canonicalize()?)
}

const NEEDED: &str = "Debian's Open MPI is needed: scripts/dependencies mpi installs it";

/// Checks that an MPI program can be compiled and run, before anything is made for it.
///
/// # Errors
/// If something is missing; the message says what to do.
pub fn check() -> Result<()> {
    provider()?;
    succeed(Command::new("mpicc").arg("--version").stdout(Stdio::null()).stderr(Stdio::null())).context(NEEDED)
}

impl MpiHosts {
    /// Two hosts, the first with a NIC or not.
    ///
    /// # Errors
    /// If something is missing; the message says what to do.
    pub fn new(nic: bool) -> Result<MpiHosts> {
        let provider = provider()?;
        let folder = std::env::temp_dir().join(format!("baton-mpi-{}-{nic}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let (hosts, anchors) = if nic { with_nic(&folder)? } else { plain(&folder)? };
        let napi = if nic { process::napi_threads("baton0") } else { Vec::new() };
        let made = MpiHosts { folder, _anchors: anchors, hosts, provider, napi };
        made.install()?;
        Ok(made)
    }

    /// Compiles the program, and writes the script by which the launcher starts its part on a host, in place of ssh.
    fn install(&self) -> Result<()> {
        let source = self.folder.join("mpi.c");
        std::fs::write(&source, SOURCE)?;
        let mut compiler = Command::new("mpicc");
        succeed(compiler.arg("-O2").arg("-o").arg(self.folder.join("program")).arg(&source)).context(NEEDED)?;
        let [a, b] = [0, 1].map(|host| self._anchors[host].0.id());
        let script = format!(
            "#!/bin/sh\nwhile case $1 in -*) true ;; *) false ;; esac; do shift; done\nhost=$1; shift\n\
             case $host in {}) pid={a} name=baton-a ;; *) pid={b} name=baton-b BATON_SOCKET=/nonexistent ;; esac\n\
             exec nsenter -n -t $pid unshare -u sh -c \"hostname $name; $*\"\n",
            ADDRESSES[0]
        );
        let path = self.folder.join("agent");
        std::fs::write(&path, script)?;
        succeed(Command::new("chmod").arg("755").arg(&path))
    }

    /// Runs a job.
    ///
    /// # Errors
    /// If it fails, or a byte is wrong.
    pub fn run(&self, carrier: Carrier, load: &Load) -> Result<MpiCell> {
        let before = self.used()?;
        let mut command = self.command(carrier, load);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let host_a = match &self.hosts {
            Hosts::Plain(host) => host,
            Hosts::WithNic(bed) => &bed.host_a,
        };
        let output = host_a.spawn(&mut command)?.wait_with_output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().find(|line| line.starts_with('{'));
        let printed: Printed = line
            .and_then(|line| serde_json::from_str(line).ok())
            .with_context(|| format!("{carrier:?}, {load:?}: mpirun printed no result: {errors}"))?;
        if printed.wrong != 0 {
            bail!("{carrier:?}, {load:?}: bytes are wrong");
        }
        let used = self.used()?;
        // The launcher's own frames, and the round trips that warm up, are among the kernel's and the NIC's: for both
        // carriers.
        let megabytes = 2.2e-6 * f64::from(load.size) * f64::from(load.rounds);
        let [kernel, nic] = [0, 1].map(|at| (used[at] - before[at]) as f64 / 1e6 / megabytes.max(1e-9));
        let host = printed.cpu_ms_per_mb + kernel;
        Ok(MpiCell {
            carrier,
            encapsulation: carrier.encapsulation(),
            nic: matches!(self.hosts, Hosts::WithNic(_)),
            size: load.size,
            median_us: printed.median_us,
            least_us: printed.least_us,
            mean_us: printed.mean_us,
            most_us: printed.most_us,
            mb_per_s: printed.mb_per_s,
            host_cpu_ms_per_mb: host,
            kernel_cpu_ms_per_mb: kernel,
            nic_cpu_ms_per_mb: nic,
            availability: (load.work > 0).then(|| printed.work_ms_per_mb / (printed.work_ms_per_mb + host)),
        })
    }

    /// Nanoseconds in which host A's kernel received and its agent ran, and of the NIC.
    fn used(&self) -> Result<[u64; 2]> {
        let Hosts::WithNic(bed) = &self.hosts else { return Ok([0; 2]) };
        let statistics = bed.tool()?.statistics()?;
        let agent = process::cpu_nanos(statistics.agent_process).context("the agent has ended")?;
        let kernel = self.napi.iter().filter_map(|thread| process::cpu_nanos(*thread)).sum::<u64>();
        Ok([kernel + agent, process::cpu_nanos(statistics.nic_process).context("the NIC has ended")?])
    }

    fn command(&self, carrier: Carrier, load: &Load) -> Command {
        let mut words: Vec<OsString> =
            ["unshare", "-u", "sh", "-c", "hostname baton-a; exec \"$@\"", "sh"].map(Into::into).into();
        words.extend(
            ["timeout", LIMIT, "mpirun", "-n", "2", "--bind-to", "none", "--map-by", "node:OVERSUBSCRIBE"].map(Into::into),
        );
        words.extend(["--mca", "plm_rsh_agent"].map(OsString::from));
        words.push(self.folder.join("agent").into());
        words.extend(["--host".into(), format!("{}:1,{}:1", ADDRESSES[0], ADDRESSES[1]).into()]);
        let transport: &[&str] = match carrier {
            Carrier::Tcp => &["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "10.77.0.0/24"],
            _ => &[
                "--mca",
                "pml",
                "cm",
                "--mca",
                "mtl",
                "ofi",
                "--mca",
                "mtl_ofi_provider_include",
                "rmpp",
                "-x",
                "FI_PROVIDER_PATH",
                "-x",
                "FI_PROVIDER",
            ],
        };
        words.extend(transport.iter().map(Into::into));
        let settings = carrier.settings();
        let names = settings.iter().map(|(name, _)| *name).chain(carrier.on_nic().then_some("LD_PRELOAD"));
        words.extend(names.flat_map(|name| ["-x", name]).map(Into::into));
        words.push(self.folder.join("program").into());
        words.extend([load.size, load.rounds, load.work].map(|number| number.to_string().into()));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).env("FI_PROVIDER_PATH", &self.provider).env("FI_PROVIDER", "rmpp");
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        if carrier.on_nic() {
            // As `baton mpi` does.
            command.env("LD_PRELOAD", self.provider.join("librmpp-memory.so"));
        }
        command.envs(settings);
        if let Hosts::WithNic(bed) = &self.hosts {
            command.env("BATON_SOCKET", bed.socket());
        }
        command
    }
}

fn with_nic(folder: &Path) -> Result<(Hosts, [Anchor; 2])> {
    let conditions = Conditions { offload: Offload::Both, ..Conditions::plain() };
    let bed = Testbed::new(&TestbedSettings {
        mtu: conditions.mtu.into(),
        link: conditions.link,
        threaded_napi: true,
        peer_queue: Some(4096),
        ..TestbedSettings::default()
    })?;
    let anchors = [Anchor::new(&bed.host_a, folder)?, Anchor::new(&bed.host_b, folder)?];
    Ok((Hosts::WithNic(Box::new(bed)), anchors))
}

fn plain(folder: &Path) -> Result<(Hosts, [Anchor; 2])> {
    let hosts = [Namespace::new()?, Namespace::new()?];
    for host in &hosts {
        host.run(|| {
            use_loss_based();
            Ok(())
        })?;
    }
    let anchors = [Anchor::new(&hosts[0], folder)?, Anchor::new(&hosts[1], folder)?];
    let [a, b] = [0, 1].map(|at| anchors[at].0.id().to_string());
    let link = ["link", "add", "mpi0", "netns", &a, "type", "veth", "peer", "name", "mpi0", "netns", &b];
    succeed(Command::new("ip").args(link))?;
    for (process, address) in [&a, &b].into_iter().zip(ADDRESSES) {
        for arguments in [&["address", "add", &format!("{address}/24"), "dev", "mpi0"][..], &["link", "set", "mpi0", "up"]] {
            succeed(Command::new("nsenter").args(["-n", "-t", process, "ip"]).args(arguments))?;
        }
    }
    let [host, _] = hosts;
    Ok((Hosts::Plain(host), anchors))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_steps_are_settings_of_the_provider() {
        let of = |carrier: Carrier, name: &str| carrier.settings().into_iter().find(|one| one.0 == name).map(|one| one.1);
        let steps =
            [(Offload::None, 0, "never", "both"), (Offload::Receive, 0, "auto", "receive"), (Offload::Both, 15, "auto", "both")];
        for (offload, early, nic, halves) in steps {
            let carrier = Carrier::Paper(offload, early);
            assert_eq!(
                (of(carrier, "FI_RMPP_NIC").as_deref(), of(carrier, "FI_RMPP_HALVES").as_deref()),
                (Some(nic), Some(halves))
            );
            assert_eq!(of(carrier, "FI_RMPP_EARLY"), Some(early.to_string()));
            assert_eq!(
                (of(carrier, "FI_RMPP_GRANT").as_deref(), of(carrier, "FI_RMPP_STREAM").as_deref()),
                (Some("16"), Some("no"))
            );
        }
        assert_eq!(of(Carrier::RmppHost, "FI_RMPP_STREAM").as_deref(), Some("yes"));
        assert_eq!(of(Carrier::RmppNic, "FI_RMPP_GRANT"), None);
    }
}
