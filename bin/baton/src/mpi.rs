//! `baton mpi`: an MPI launcher whose ranks talk over the libfabric provider rmpp.

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const EXAMPLES: &str = "Examples:
  baton mpi -- mpirun -n 2 --host a,b --bind-to none ./program
  baton mpi --address 10.0.0.1 -- fi_info -p rmpp
  baton mpi -- mpiexec -n 4 ./program        # MPICH 5

  baton mpi --nic always -- mpirun -n 2 ./program

Works with Open MPI 4.1 and 5 and with MPICH 5 built for libfabric (docs/guide/mpi.md). Needs no privilege. A NIC is used on each host
where an agent listens (at BATON_SOCKET, or /run/baton/agent.sock; `baton up` starts one). FI_LOG_LEVEL=info FI_LOG_PROV=rmpp shows
whether it is. Without one, the data of messages of 64 KB and more goes by TCP connections beside the UDP packets; FI_RMPP_STREAM=no
keeps all in packets. Settings are environment variables (docs/reference/settings.md), which launchers must pass on to other hosts.";

/// The name by which libfabric finds a provider in FI_PROVIDER_PATH.
const NAME: &str = "librmpp-fi.so";

/// Beside it: the library by which blocks of the program's malloc(3) lie in memory that the NIC reaches.
const MEMORY: &str = "librmpp-memory.so";

/// Whether the NIC fragments, places and sends.
#[derive(Clone, Copy, ValueEnum)]
enum Nic {
    /// Where there is one.
    Auto,
    /// On every host; a rank without one fails.
    Always,
    /// On no host.
    Never,
}

#[derive(Args)]
pub struct MpiArguments {
    /// This host's address for messages; otherwise the first that is not loopback.
    #[arg(long)]
    address: Option<std::net::IpAddr>,
    /// Let MPICH's ranks of one host talk over the provider too, instead of over shared memory.
    #[arg(long)]
    no_local: bool,
    /// Whether a NIC fragments, places and sends.
    #[arg(long, value_enum, default_value_t = Nic::Auto, value_name = "WHEN")]
    nic: Nic,
    /// The launcher and its arguments.
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// What is set for every rank. Open MPI reads its parameters from OMPI_MCA_*, MPICH from MPIR_CVAR_*.
fn environment(provider: &Path, arguments: &MpiArguments) -> Vec<(&'static str, OsString)> {
    let nic = match arguments.nic {
        Nic::Auto => "auto",
        Nic::Always => "always",
        Nic::Never => "never",
    };
    let mut all: Vec<(&str, OsString)> = vec![
        ("FI_PROVIDER_PATH", provider.into()),
        ("FI_PROVIDER", "rmpp".into()),
        ("OMPI_MCA_pml", "cm".into()),
        ("OMPI_MCA_mtl", "ofi".into()),
        ("OMPI_MCA_mtl_ofi_provider_include", "rmpp".into()),
        ("MPIR_CVAR_CH4_NETMOD", "ofi".into()),
        ("FI_RMPP_NIC", nic.into()),
    ];
    // Open MPI 4.1 passes only what is named on to other hosts.
    let mut passed = String::from("FI_PROVIDER_PATH;FI_PROVIDER;FI_RMPP_NIC");
    if !matches!(arguments.nic, Nic::Never)
        && let Some(libraries) = preloaded(provider)
    {
        all.push(("LD_PRELOAD", libraries));
        passed += ";LD_PRELOAD";
    }
    all.push(("OMPI_MCA_mca_base_env_list", passed.into()));
    if arguments.no_local {
        all.push(("MPIR_CVAR_NOLOCAL", "1".into()));
    }
    if let Some(address) = arguments.address {
        all.push(("FI_RMPP_ADDRESS", address.to_string().into()));
    }
    all
}

/// What is preloaded: the library for memory, before those that are preloaded already. None without it, or with a path
/// that LD_PRELOAD cannot name: then messages are copied.
fn preloaded(provider: &Path) -> Option<OsString> {
    let library = provider.join(MEMORY).into_os_string();
    let named = !library.to_string_lossy().contains([' ', ':']) && Path::new(&library).exists();
    named.then(|| match std::env::var_os("LD_PRELOAD") {
        Some(others) => [library, others].join(OsStr::new(":")),
        None => library,
    })
}

/// Becomes the launcher (execve). Returns only on an error.
pub fn run(arguments: &MpiArguments) -> Result<()> {
    let Some(program) = arguments.command.first() else {
        bail!("which launcher? `baton mpi -- mpirun -n 2 ./program`; see `baton mpi --help`");
    };
    let provider = find_provider()?;
    let error = Command::new(program).args(&arguments.command[1..]).envs(environment(&provider, arguments)).exec();
    eprintln!("baton: {}: {error}", program.display());
    std::process::exit(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 });
}

/// The folder of the provider: where `make provider` puts it, or where it is installed.
fn find_provider() -> Result<PathBuf> {
    let program = std::env::current_exe().context("finding this program's own path")?;
    let directory = program.parent().unwrap_or(Path::new("/"));
    let places = [directory.join("../provider"), directory.join("../lib/baton")];
    match places.iter().find(|place| place.join(NAME).exists()) {
        Some(place) => Ok(place.canonicalize()?),
        None => bail!(
            "{NAME} is missing: neither in {} nor in {}; `make provider` builds it",
            places[0].display(),
            places[1].display()
        ),
    }
}
