//! What a unit's files say, and the drop-in that starts its commands by `baton run`. Text in, text out.

use anyhow::{Result, bail};

/// An assignment in a unit's file.
#[derive(Debug, PartialEq, Eq)]
pub struct Assignment {
    pub section: String,
    pub key: String,
    pub value: String,
}

/// One command of an ExecStart= line, as it stands there: quotes, specifiers and variables stay.
#[derive(Debug, PartialEq, Eq)]
pub struct Command {
    /// What stands before the path, without `@`.
    prefixes: String,
    /// With `@`: the name by which the program is called.
    name: Option<String>,
    /// The path as it is written.
    path: String,
    arguments: Vec<String>,
}

/// The assignments of a file, in their order. A line that ends in a backslash goes on in the next one that is no
/// comment.
pub fn assignments(text: &str) -> Vec<Assignment> {
    let (mut section, mut all, mut begun) = (String::new(), Vec::new(), String::new());
    for line in text.lines() {
        let is_comment = line.trim_start().starts_with(['#', ';']);
        if is_comment || (begun.is_empty() && line.trim().is_empty()) {
            continue;
        }
        if let Some(part) = line.strip_suffix('\\') {
            begun += part;
            begun.push(' ');
            continue;
        }
        let whole = std::mem::take(&mut begun) + line;
        let whole = whole.trim();
        if let Some(name) = whole.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = name.to_owned();
        } else if let Some((key, value)) = whole.split_once('=') {
            let (key, value) = (key.trim().to_owned(), value.trim().to_owned());
            all.push(Assignment { section: section.clone(), key, value });
        }
    }
    all
}

/// The values of a key of the section [Service] in all files, in their order. An empty value forgets those before it.
pub fn values<'a>(all: &'a [Assignment], key: &str) -> Vec<&'a str> {
    values_in(all, "Service", key)
}

fn values_in<'a>(all: &'a [Assignment], section: &str, key: &str) -> Vec<&'a str> {
    let mut values = Vec::new();
    for one in all.iter().filter(|one| one.section == section && one.key == key) {
        if one.value.is_empty() {
            values.clear();
        } else {
            values.push(one.value.as_str());
        }
    }
    values
}

/// The words of a line as they are written, with their quotes.
fn words(line: &str) -> Result<Vec<&str>> {
    let mut words = Vec::new();
    let (mut begin, mut quote, mut escaped) = (None, None, false);
    for (at, character) in line.char_indices() {
        let inside = quote.is_some();
        if escaped {
            escaped = false;
        } else if character == '\\' {
            escaped = true;
        } else if quote == Some(character) {
            quote = None;
        } else if !inside && matches!(character, '"' | '\'') {
            quote = Some(character);
        } else if !inside && character.is_ascii_whitespace() {
            if let Some(begin) = begin.take() {
                words.push(&line[begin..at]);
            }
            continue;
        }
        begin.get_or_insert(at);
    }
    if quote.is_some() {
        bail!("ExecStart={line} has a quote without an end");
    }
    words.extend(begin.map(|begin| &line[begin..]));
    Ok(words)
}

/// A word without its quotes and escapes, where those are of the usual kinds.
fn unquoted(word: &str) -> String {
    let (mut text, mut quote, mut escaped) = (String::new(), None, false);
    for character in word.chars() {
        if escaped {
            escaped = false;
            text.push(if character == 's' { ' ' } else { character });
        } else if character == '\\' {
            escaped = true;
        } else if quote == Some(character) {
            quote = None;
        } else if quote.is_none() && matches!(character, '"' | '\'') {
            quote = Some(character);
        } else {
            text.push(character);
        }
    }
    text
}

/// A text as one word of an ExecStart= line.
fn quoted(text: &str) -> String {
    let doubled = text.replace('%', "%%").replace('$', "$$");
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "_-./:=,+@%$".contains(character);
    if !text.is_empty() && text.chars().all(is_plain) {
        return doubled;
    }
    format!("\"{}\"", doubled.replace('\\', "\\\\").replace('"', "\\\""))
}

/// The commands of a value of ExecStart=: several are parted by a semicolon that is a word of its own.
///
/// # Errors
/// If it cannot be read.
pub fn commands(value: &str) -> Result<Vec<Command>> {
    let words = words(value)?;
    words.split(|word| *word == ";").filter(|words| !words.is_empty()).map(|words| command(value, words)).collect()
}

fn command(value: &str, words: &[&str]) -> Result<Command> {
    let first = words[0];
    let rest = first.trim_start_matches(['@', '-', ':', '+', '!', '|']);
    let prefixes = &first[..first.len() - rest.len()];
    if prefixes.contains('|') {
        bail!("ExecStart={value} is run by a shell (`|`)");
    }
    let mut words = words[1..].iter().copied();
    // systemd allows no space between, but who has one means this.
    let path = if rest.is_empty() { words.next().unwrap_or_default() } else { rest };
    if path.is_empty() {
        bail!("ExecStart={value} names no program");
    }
    let name = if prefixes.contains('@') {
        let Some(name) = words.next() else { bail!("ExecStart={value} has `@`, and no name for the program") };
        Some(name.to_owned())
    } else {
        None
    };
    Ok(Command {
        prefixes: prefixes.replace('@', ""),
        name,
        path: path.to_owned(),
        arguments: words.map(str::to_owned).collect(),
    })
}

impl Command {
    /// The program's path; None if only systemd knows it, since it has a specifier.
    pub fn program(&self) -> Option<String> {
        let path = unquoted(&self.path).replace("%%", "\0");
        (!path.contains('%')).then(|| path.replace('\0', "%"))
    }

    /// Whether it is Baton's own command: `baton run` already, or `baton up`.
    pub fn is_baton(&self) -> bool {
        self.program().is_some_and(|path| path == "baton" || path.ends_with("/baton"))
    }

    /// The value of ExecStart= by which `baton` runs it with these options.
    fn under(&self, baton: &str, options: &[String]) -> String {
        let mut words = vec![self.prefixes.clone() + &quoted(baton), "run".to_owned(), "--if-up".to_owned()];
        words.extend(options.iter().map(|option| quoted(option)));
        if let Some(name) = &self.name {
            words.extend(["--argv0".to_owned(), name.clone()]);
        }
        words.push("--".to_owned());
        // In the path `$` is a character as any other; in an argument it begins a variable.
        words.push(if self.prefixes.contains(':') { self.path.clone() } else { self.path.replace('$', "$$") });
        words.extend(self.arguments.iter().cloned());
        words.join(" ")
    }
}

/// The drop-in for a unit with these settings and commands. `library`: the folder of the preloaded library.
pub fn drop_in(unit: &str, all: &[Assignment], commands: &[Command], baton: &str, library: &str, options: &[String]) -> String {
    let lines: String = commands.iter().map(|command| format!("ExecStart={}\n", command.under(baton, options))).collect();
    let allowed = if values(all, "NoExecPaths").is_empty() {
        String::new()
    } else {
        format!("ExecPaths={} {}\n", quoted(baton), quoted(library))
    };
    format!(
        "# Written by `baton enable {unit}`; `baton disable {unit}` removes it.\n[Unit]\nWants=baton.service\n\
         After=baton.service\n\n[Service]\n{allowed}ExecStart=\n{lines}"
    )
}

/// Why the program of a unit with these settings cannot be run by Baton; None if it can.
pub fn refusal(all: &[Assignment]) -> Option<String> {
    if values_in(all, "Unit", "DefaultDependencies").last().is_some_and(|value| is_off(value)) {
        return Some("DefaultDependencies=no: it starts before a Baton can be up".into());
    }
    for key in ["RootDirectory", "RootImage"] {
        if let Some(root) = values(all, key).last() {
            return Some(format!("{key}={root} gives it a root directory of its own, which has no Baton"));
        }
    }
    let families = values(all, "RestrictAddressFamilies");
    let allows = |families: &[&str]| families.iter().any(|list| list.split_whitespace().any(|one| one == "AF_UNIX"));
    let (denied, allowed): (Vec<_>, Vec<_>) = families.into_iter().partition(|list| list.starts_with('~'));
    let denied: Vec<&str> = denied.into_iter().map(|list| &list[1..]).collect();
    if (!allowed.is_empty() && !allows(&allowed)) || allows(&denied) {
        return Some("RestrictAddressFamilies= keeps it from the agent's socket: add AF_UNIX".into());
    }
    None
}

fn is_off(value: &str) -> bool {
    ["no", "false", "off", "0", "n", "f"].contains(&value)
}

/// Settings by which systemd attaches BPF programs to a unit's control group.
const PROGRAMS: [&str; 9] = [
    "IPAccounting",
    "IPAddressAllow",
    "IPAddressDeny",
    "IPIngressFilterPath",
    "IPEgressFilterPath",
    "SocketBindAllow",
    "SocketBindDeny",
    "RestrictNetworkInterfaces",
    "BPFProgram",
];

/// What keeps the connections of a unit with these settings in the kernel, or may.
pub fn cautions(all: &[Assignment]) -> Vec<String> {
    let mut cautions = Vec::new();
    for key in PROGRAMS {
        if let Some(value) = values(all, key).last().filter(|value| !is_off(value)) {
            cautions.push(format!("{key}={value} attaches BPF programs to its control group: connections stay in the kernel"));
        }
    }
    if !values(all, "SystemCallFilter").is_empty() {
        cautions
            .push("SystemCallFilter= may keep Baton from calls that it needs: then it runs without, which its log says".into());
    }
    cautions
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATON: &str = "/usr/bin/baton";
    const LIBRARY: &str = "/usr/lib/baton";

    /// The ExecStart= lines of the drop-in of a unit.
    fn wrapped(unit: &str) -> Vec<String> {
        let all = assignments(unit);
        let commands: Vec<Command> =
            values(&all, "ExecStart").into_iter().flat_map(|value| commands(value).expect("it can be read")).collect();
        let text = drop_in("some.service", &all, &commands, BATON, LIBRARY, &[]);
        let (before, lines) = text.split_once("\nExecStart=\n").expect("the list is emptied first");
        assert!(before.ends_with("[Service]") && before.contains("After=baton.service"), "{text}");
        lines.lines().map(|line| line.strip_prefix("ExecStart=").expect("only commands").to_owned()).collect()
    }

    fn one(value: &str) -> String {
        let [line] = &wrapped(&format!("[Service]\nExecStart={value}\n"))[..] else { panic!("one command") };
        line.clone()
    }

    #[test]
    fn units_of_all_types() {
        let nginx = "[Unit]\nDescription=A web server\n[Service]\nType=forking\nPIDFile=/run/nginx.pid\n\
            ExecStartPre=/usr/sbin/nginx -t -q -g 'daemon on; master_process on;'\n\
            ExecStart=/usr/sbin/nginx -g 'daemon on; master_process on;'\n\
            ExecReload=/usr/sbin/nginx -g 'daemon on; master_process on;' -s reload\n";
        assert_eq!(wrapped(nginx), ["/usr/bin/baton run --if-up -- /usr/sbin/nginx -g 'daemon on; master_process on;'"]);
        let redis =
            "[Service]\nType=notify\nExecStart=/usr/bin/redis-server /etc/redis/redis.conf --supervised systemd --daemonize no\n";
        assert_eq!(
            wrapped(redis),
            ["/usr/bin/baton run --if-up -- /usr/bin/redis-server /etc/redis/redis.conf --supervised systemd --daemonize no"]
        );
        let activated = "[Unit]\nRequires=echo.socket\n[Service]\nExecStart=-/usr/sbin/echod -i\nStandardInput=socket\n";
        assert_eq!(wrapped(activated), ["-/usr/bin/baton run --if-up -- /usr/sbin/echod -i"]);
        let several = "[Service]\nType=oneshot\nExecStart=/bin/a 1\nExecStart=/bin/b 2\nExecStart=/bin/c ; /bin/d \\; x\n";
        assert_eq!(
            wrapped(several),
            [
                "/usr/bin/baton run --if-up -- /bin/a 1",
                "/usr/bin/baton run --if-up -- /bin/b 2",
                "/usr/bin/baton run --if-up -- /bin/c",
                "/usr/bin/baton run --if-up -- /bin/d \\; x",
            ]
        );
    }

    #[test]
    fn prefixes_stay_in_front() {
        for prefix in ["-", "+", "!", "!!", ":", "-+", "-:!"] {
            assert_eq!(one(&format!("{prefix}/bin/a b")), format!("{prefix}/usr/bin/baton run --if-up -- /bin/a b"));
        }
        assert_eq!(one("@/usr/sbin/sshd sshd: -D"), "/usr/bin/baton run --if-up --argv0 sshd: -- /usr/sbin/sshd -D");
        assert_eq!(one("-@/bin/a \"a b\" c"), "-/usr/bin/baton run --if-up --argv0 \"a b\" -- /bin/a c");
        assert!(commands("|/bin/a").expect_err("a shell").to_string().contains("shell"));
        assert!(commands("@/bin/a").expect_err("no name").to_string().contains("no name"));
        assert!(commands("-").expect_err("no program").to_string().contains("no program"));
    }

    #[test]
    fn quotes_specifiers_and_variables_stay() {
        assert_eq!(
            one("/usr/bin/%p-%i --name=%i --dir \"%t/a b\" 'it is' $OPTIONS ${HOME}/x a\\x20b %%"),
            "/usr/bin/baton run --if-up -- /usr/bin/%p-%i --name=%i --dir \"%t/a b\" 'it is' $OPTIONS ${HOME}/x a\\x20b %%"
        );
        assert_eq!(one("\"/opt/my server/bin/run\" x"), "/usr/bin/baton run --if-up -- \"/opt/my server/bin/run\" x");
        assert_eq!(one("/opt/$odd/a $B"), "/usr/bin/baton run --if-up -- /opt/$$odd/a $B");
        assert_eq!(one(":/opt/$odd/a $B"), ":/usr/bin/baton run --if-up -- /opt/$odd/a $B");
        assert_eq!(one("/bin/sh -c 'a; b \"c\"'"), "/usr/bin/baton run --if-up -- /bin/sh -c 'a; b \"c\"'");
        assert!(commands("/bin/a 'b").expect_err("no end").to_string().contains("without an end"));
    }

    #[test]
    fn lines_that_go_on() {
        let unit = "[Service]\nExecStart=/bin/a \\\n  --one \\\n# a comment between\n; another\n  --two\nUser=x\n";
        assert_eq!(wrapped(unit), ["/usr/bin/baton run --if-up -- /bin/a --one --two"]);
        assert_eq!(values(&assignments(unit), "User"), ["x"]);
    }

    #[test]
    fn an_empty_value_forgets_those_before() {
        let unit = "[Service]\nExecStart=/bin/a\n[Install]\nExecStart=/bin/no\n[Service]\nExecStart =\nExecStart = /bin/b\n";
        assert_eq!(wrapped(unit), ["/usr/bin/baton run --if-up -- /bin/b"]);
        assert_eq!(values(&assignments("[Service]\nExecStart=/bin/a\nExecStart=\n"), "ExecStart"), [""; 0]);
    }

    #[test]
    fn options_are_quoted() {
        let commands = commands("/bin/a").expect("it can be read");
        let options = ["--rule", "accepted,local-port=80", "--log", "/var/log/a b", "--x", "5%$"].map(String::from);
        let text = drop_in("a.service", &[], &commands, "/opt/my baton/baton", LIBRARY, &options);
        assert!(
            text.ends_with(
                "ExecStart=\"/opt/my baton/baton\" run --if-up --rule accepted,local-port=80 --log \"/var/log/a b\" --x 5%%$$ -- /bin/a\n"
            ),
            "{text}"
        );
    }

    #[test]
    fn baton_may_be_executed_where_little_may() {
        let all = assignments("[Service]\nNoExecPaths=/\nExecPaths=/bin/a\nExecStart=/bin/a\n");
        let text = drop_in("a.service", &all, &commands("/bin/a").expect("it can be read"), BATON, LIBRARY, &[]);
        assert!(text.contains("[Service]\nExecPaths=/usr/bin/baton /usr/lib/baton\nExecStart=\n"), "{text}");
    }

    #[test]
    fn programs_are_known_where_they_can_be() {
        let program = |value: &str| commands(value).expect("it can be read")[0].program();
        assert_eq!(program("-\"/opt/a b/c\" d").as_deref(), Some("/opt/a b/c"));
        assert_eq!(program("/opt/a\\x20b/c"), Some("/opt/ax20b/c".into()));
        assert_eq!(program("/opt/%i"), None);
        assert_eq!(program("/opt/%%i").as_deref(), Some("/opt/%i"));
        let is_baton = |value: &str| commands(value).expect("it can be read")[0].is_baton();
        assert!(is_baton("/usr/bin/baton run -- /bin/a") && is_baton("-baton up") && !is_baton("/usr/bin/batons up"));
    }

    #[test]
    fn what_cannot_be_run_so_is_refused() {
        let why = |text: &str| refusal(&assignments(&format!("[Service]\n{text}\n")));
        assert!(why("RootDirectory=/srv/jail").expect("refused").contains("/srv/jail"));
        assert!(why("RootImage=/srv/image").expect("refused").contains("RootImage"));
        assert!(why("RestrictAddressFamilies=AF_INET AF_INET6").expect("refused").contains("AF_UNIX"));
        assert!(why("RestrictAddressFamilies=~AF_UNIX").is_some());
        assert_eq!(why("RestrictAddressFamilies=AF_INET\nRestrictAddressFamilies=AF_UNIX"), None);
        assert_eq!(why("RestrictAddressFamilies=~AF_PACKET"), None);
        assert_eq!(why("RootDirectory=/srv/jail\nRootDirectory="), None);
        let early = refusal(&assignments("[Unit]\nDefaultDependencies=no\n[Service]\nExecStart=/bin/a\n"));
        assert!(early.expect("refused").contains("before"));
        let warned = |text: &str| cautions(&assignments(&format!("[Service]\n{text}\n"))).len();
        assert_eq!(warned("IPAccounting=yes\nSystemCallFilter=@system-service"), 2);
        assert_eq!(warned("IPAccounting=no\nPrivateUsers=yes"), 0);
        assert_eq!(warned("IPAddressAllow=10.0.0.0/8\nSocketBindAllow=tcp:80\nRestrictNetworkInterfaces=eth0"), 3);
        assert_eq!(warned("BPFProgram=egress:/sys/fs/bpf/filter\nBPFProgram="), 0);
    }
}
