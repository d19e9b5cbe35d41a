//! Unmodified web servers: nginx if it is installed, else [`crate::small_server`]. They serve files whose bytes can be
//! checked: `/KEY/LENGTH` contains the first LENGTH bytes of stream KEY.

use crate::temporary::{Directory, Kind};
use anyhow::{Context, Result};
use baton_linux::events::monotonic_micros;
use baton_linux::namespace::Namespace;
use baton_linux::process;
use baton_sim::stream;
use std::ffi::OsString;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A directory of files to serve, which is removed when this is dropped.
#[derive(Debug)]
pub struct Files {
    directory: Directory,
}

impl Files {
    /// Makes the directory.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> Result<Files> {
        Ok(Files { directory: Directory::new(Kind::Files)? })
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        self.directory.path()
    }

    /// Where a server at `address` that counts ([`Program::command`]) says how many requests it has answered: a Unix
    /// socket.
    pub fn counter(&self, address: SocketAddr) -> PathBuf {
        self.root().join(format!("counter-{}.sock", address.port()))
    }

    /// Makes the file of the first `length` bytes of stream `key`.
    ///
    /// # Errors
    /// The system's.
    pub fn add(&self, key: u64, length: usize) -> Result<()> {
        let directory = self.root().join(key.to_string());
        std::fs::create_dir_all(&directory)?;
        let mut bytes = vec![0; length];
        stream::fill(key, 0, &mut bytes);
        let path = directory.join(length.to_string());
        std::fs::write(&path, bytes).with_context(|| format!("writing {}", path.display()))
    }
}

/// A program that serves files.
#[derive(Clone, Debug)]
pub enum Program {
    /// nginx, at this path.
    Nginx(PathBuf),
    /// [`crate::small_server`], in a process of its own.
    Small,
}

/// nginx's configuration: one thread, any number of requests per connection, and nothing that depends on where nginx is
/// installed.
const NGINX: &str = "daemon off; master_process off; pid ROOT/nginx-PORT.pid; error_log stderr crit;
worker_rlimit_nofile 8192;
events { worker_connections 4096; }
http {
    access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000000; open_file_cache max=4096;
    client_body_temp_path ROOT/t; proxy_temp_path ROOT/t; fastcgi_temp_path ROOT/t; uwsgi_temp_path ROOT/t; scgi_temp_path ROOT/t;
    server { listen ADDRESS; root ROOT; default_type application/octet-stream; }
    COUNTER
}
";

impl Program {
    /// The best server that is installed.
    pub fn find() -> Program {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let places = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin"), PathBuf::from("/usr/local/sbin")]);
        let nginx = places.map(|place| place.join("nginx")).find(|place| place.is_file());
        nginx.map_or(Program::Small, Program::Nginx)
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Program::Nginx(_) => "nginx",
            Program::Small => "a small web server",
        }
    }

    /// The words of its command, with which it serves these files at `address`. One that counts says at
    /// [`Files::counter`] how many requests it has answered, as nginx's stub_status does.
    ///
    /// # Errors
    /// The system's, if its configuration cannot be written; and if another server than nginx is to count.
    pub fn command(&self, files: &Files, address: SocketAddr, counts: bool) -> Result<Vec<OsString>> {
        Ok(match self {
            Program::Nginx(path) => {
                let path = path.clone().into_os_string();
                let configuration = files.root().join(format!("nginx-{}.conf", address.port()));
                let (root, counter) = (files.root().display().to_string(), files.counter(address));
                let text = NGINX.replace("ROOT", &root).replace("ADDRESS", &address.to_string());
                let status = || format!("server {{ listen unix:{}; location / {{ stub_status; }} }}", counter.display());
                let status = counts.then(status).unwrap_or_default();
                // Of a server that was killed.
                let _ = std::fs::remove_file(&counter);
                let text = text.replace("PORT", &address.port().to_string()).replace("COUNTER", &status);
                std::fs::write(&configuration, text)?;
                vec![path, "-e".into(), "stderr".into(), "-p".into(), root.into(), "-c".into(), configuration.into()]
            }
            Program::Small => {
                anyhow::ensure!(!counts, "{} does not count requests: install nginx-light", self.name());
                let program = std::env::current_exe()?.into_os_string();
                vec![program, "serve-files".into(), address.to_string().into(), files.root().as_os_str().to_owned()]
            }
        })
    }

    /// Starts it on a host, under `baton run` if an agent is given, and waits until it listens.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(&self, host: &Namespace, files: &Files, address: SocketAddr, agent: Option<&Path>) -> Result<Server> {
        let words = self.command(files, address, false)?;
        let mut server = Server::start(host, &words, files.root(), agent).with_context(|| format!("starting {}", self.name()))?;
        server.listens(host, address)?;
        Ok(server)
    }
}

/// A running server, which is ended when this is dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    /// The file with what it prints to standard error.
    messages: PathBuf,
}

impl Server {
    /// Starts a program on a host, in a directory; under `baton run` if an agent is given.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(host: &Namespace, words: &[OsString], directory: &Path, agent: Option<&Path>) -> Result<Server> {
        let mut command = match agent {
            None => Command::new(&words[0]),
            Some(agent) => {
                let mut command = Command::new(std::env::current_exe()?);
                command.arg("run").arg("--socket").arg(agent).args(["--rule", "established", "--"]).arg(&words[0]);
                command
            }
        };
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let messages = directory.join(format!("messages-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
        command.args(&words[1..]).current_dir(directory).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(std::fs::File::create(&messages)?);
        process::inherit(&mut command, &[], true);
        let child = host.spawn(&mut command).with_context(|| format!("starting {}", words[0].display()))?;
        Ok(Server { child, messages })
    }

    /// Waits until it listens.
    ///
    /// # Errors
    /// If it has ended, with what it said, or does not listen for 20 seconds.
    pub fn listens(&mut self, host: &Namespace, address: SocketAddr) -> Result<()> {
        let deadline = monotonic_micros() + 20_000_000;
        while host.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(1))).is_err() {
            self.check()?;
            anyhow::ensure!(monotonic_micros() < deadline, "the server does not listen at {address}");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Checks that it has not ended.
    ///
    /// # Errors
    /// If it has, with what it said.
    pub fn check(&mut self) -> Result<()> {
        let Some(status) = self.child.try_wait()? else { return Ok(()) };
        let said = std::fs::read_to_string(&self.messages).unwrap_or_default();
        anyhow::bail!("it ended ({status}): {}", said.trim());
    }

    /// Its process's number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Binds it to a core, if the machine has that.
    pub fn pin(&self, core: usize) {
        process::pin(self.child.id() as i32, core);
    }

    /// Nanoseconds of CPU that it has used.
    pub fn cpu(&self) -> Option<u64> {
        process::cpu_nanos(self.child.id())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.messages);
    }
}
