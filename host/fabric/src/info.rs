//! fi_getinfo(3): the provider's offer for each address of the host that matches the program's hints.

use crate::abi::{
    AV_TABLE, DomainAttr, EP_RDM, EpAttr, FabricAttr, Info, ORDER_SAS, PROGRESS_AUTO, RM_ENABLED, RxAttr, THREAD_SAFE, TxAttr,
    caps, errno, flags, format, mr,
};
use crate::addresses::{self, Local, to_bytes};
use crate::libfabric::{Level, log};
use crate::object::{attributes, failure};
use crate::settings;
use baton_messages::{MAX_LENGTH, Settings};
use std::ffi::{CString, c_char, c_int, c_void};
use std::net::{IpAddr, SocketAddr};

/// All that endpoints can do.
pub const CAPS: u64 = caps::MSG
    | caps::TAGGED
    | caps::RMA
    | caps::SEND
    | caps::RECV
    | caps::READ
    | caps::WRITE
    | caps::REMOTE_READ
    | caps::REMOTE_WRITE
    | caps::MULTI_RECV
    | caps::LOCAL_COMM
    | caps::REMOTE_COMM
    | caps::SOURCE
    | caps::RMA_EVENT
    | caps::DIRECTED_RECV;
/// What only the sending side does, and only the receiving one.
const SENDING: u64 = caps::SEND | caps::READ | caps::WRITE;
const RECEIVING: u64 =
    caps::RECV | caps::REMOTE_READ | caps::REMOTE_WRITE | caps::MULTI_RECV | caps::SOURCE | caps::DIRECTED_RECV | caps::RMA_EVENT;
/// Capabilities that an endpoint has only on request.
const ON_REQUEST: u64 =
    caps::SOURCE | caps::RMA_EVENT | caps::MULTI_RECV | caps::DIRECTED_RECV | caps::LOCAL_COMM | caps::REMOTE_COMM;

/// Bytes that fi_inject() takes.
pub const INJECT: usize = 1024;
/// Parts of a buffer.
pub const PARTS: usize = 8;
/// Bytes of remote CQ data.
const CQ_DATA: usize = 4;
/// Objects of each kind: as many as there is memory for.
const MANY: usize = 1 << 16;
/// Bytes of each structure. Later versions of libfabric have appended fields, in which zero means unset.
const STRUCTURE: usize = 1024;

/// A program's request.
struct Wanted<'a> {
    hints: Option<&'a Info>,
    /// Its address, or the address it wants to reach.
    source: Option<SocketAddr>,
    destination: Option<SocketAddr>,
}

/// The getinfo function of the provider.
pub unsafe extern "C" fn getinfo(
    _version: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const Info,
    out: *mut *mut Info,
) -> c_int {
    // SAFETY: libfabric's promise to a provider: hints are null or complete, texts are null or C strings, `out` is a
    // place for a pointer.
    unsafe {
        let hints = attributes(hints);
        let node_and_service = [addresses::text(node), addresses::text(service)];
        let wanted = match Wanted::new(hints, node_and_service, flags) {
            Ok(wanted) if out.is_null() || !fits(hints) => {
                return failure(if wanted.hints.is_some() || !out.is_null() { errno::ENODATA } else { errno::EINVAL });
            }
            Ok(wanted) => wanted,
            Err(error) => return failure(error),
        };
        let mut first = std::ptr::null_mut::<Info>();
        for local in candidates(&wanted).iter().rev() {
            let made = make(&wanted, local);
            if made.is_null() {
                return failure(errno::ENOMEM);
            }
            (*made).next = first;
            first = made;
        }
        if first.is_null() {
            log(Level::Info, "no address of this host is what is asked for (FI_RMPP_ADDRESS, the source address, its family)");
            return failure(errno::ENODATA);
        }
        *out = first;
    }
    0
}

impl<'a> Wanted<'a> {
    /// # Safety
    /// `hints` is complete: its pointers are null or valid.
    unsafe fn new(hints: Option<&'a Info>, [node, service]: [Option<&str>; 2], flags: u64) -> Result<Wanted<'a>, c_int> {
        // SAFETY: this function's `# Safety`.
        let [mut source, mut destination] = unsafe {
            hints.map_or([None, None], |hints| {
                [addresses::read(hints.src_addr, hints.src_addrlen), addresses::read(hints.dest_addr, hints.dest_addrlen)]
            })
        };
        if (node.is_some() || service.is_some()) && flags & flags::PROV_ATTR_ONLY == 0 {
            let v6 = hints.and_then(|hints| match hints.addr_format {
                format::SOCKADDR_IN => Some(false),
                format::SOCKADDR_IN6 => Some(true),
                _ => None,
            });
            let address = addresses::resolve(node, service, v6).ok_or(errno::ENODATA)?;
            match (flags & flags::SOURCE != 0, node.is_some()) {
                // A port without an address: any address of this host.
                (true, false) => {
                    source = Some(SocketAddr::new(source.map_or(IpAddr::from([0, 0, 0, 0]), |known| known.ip()), address.port()))
                }
                (true, true) => source = Some(address),
                (false, _) => destination = Some(address),
            }
        }
        Ok(Wanted { hints, source, destination })
    }
}

/// Whether this provider can satisfy the hints.
///
/// # Safety
/// The pointers of `hints` are null or valid.
unsafe fn fits(hints: Option<&Info>) -> bool {
    let Some(hints) = hints else { return true };
    // SAFETY: this function's `# Safety`.
    let (ep, tx, rx, domain, fabric) = unsafe {
        (
            attributes(hints.ep_attr),
            attributes(hints.tx_attr),
            attributes(hints.rx_attr),
            attributes(hints.domain_attr),
            attributes(hints.fabric_attr),
        )
    };
    // SAFETY: names are null or C strings.
    let fabric_name = fabric.and_then(|fabric| unsafe { addresses::text(fabric.name) });
    let refused = [
        (hints.caps & !CAPS != 0, "a capability"),
        (
            !matches!(hints.addr_format, format::UNSPEC | format::SOCKADDR | format::SOCKADDR_IN | format::SOCKADDR_IN6),
            "the address format",
        ),
        (ep.is_some_and(|ep| !matches!(ep.kind, 0 | EP_RDM)), "the endpoint type"),
        (ep.is_some_and(|ep| ep.protocol != 0 || ep.max_msg_size > MAX_LENGTH as usize), "the protocol or message size"),
        (ep.is_some_and(|ep| ep.tx_ctx_cnt > 1 && ep.tx_ctx_cnt != usize::MAX || ep.rx_ctx_cnt > 1), "several contexts"),
        (tx.is_some_and(|tx| (tx.msg_order | tx.comp_order) & !ORDER_SAS != 0 || tx.comp_order != 0), "an order of sends"),
        (rx.is_some_and(|rx| rx.msg_order & !ORDER_SAS != 0 || rx.comp_order != 0), "an order of receives"),
        (tx.is_some_and(|tx| tx.inject_size > INJECT || tx.iov_limit > PARTS || tx.rma_iov_limit > 1), "a limit of sends"),
        (rx.is_some_and(|rx| rx.iov_limit > PARTS), "a limit of receives"),
        (tx.is_some_and(|tx| tx.size > Settings::default().sends.into()), "the number of sends"),
        (rx.is_some_and(|rx| rx.size > Settings::default().receives.into()), "the number of receives"),
        (domain.is_some_and(|domain| domain.cq_data_size > CQ_DATA || domain.mr_key_size > 8), "the size of CQ data or keys"),
        (fabric_name.is_some_and(|name| name != FABRIC), "the fabric's name"),
    ];
    for (_, what) in refused.iter().filter(|(refused, _)| *refused) {
        log(Level::Info, &format!("{what} of the hints is not what this provider has"));
    }
    !refused.iter().any(|(refused, _)| *refused)
}

/// Name of the fabric.
const FABRIC: &str = "rmpp";

/// The addresses that an endpoint may have for this request.
fn candidates(wanted: &Wanted<'_>) -> Vec<Local> {
    let mut all = addresses::all();
    let address = wanted.source.map(|source| source.ip()).filter(|address| !address.is_unspecified()).or_else(settings::address);
    let address = address.or_else(|| addresses::towards(wanted.destination?));
    if let Some(address) = address {
        all.retain(|local| local.address == address);
    }
    if let Some(hints) = wanted.hints {
        all.retain(|local| match hints.addr_format {
            format::SOCKADDR_IN => local.address.is_ipv4(),
            format::SOCKADDR_IN6 => local.address.is_ipv6(),
            _ => true,
        });
        // SAFETY: libfabric's promise to a provider: the hints' pointers are null or valid, names null or C strings.
        let name = unsafe { attributes(hints.domain_attr).and_then(|domain| addresses::text(domain.name)) };
        if let Some(name) = name {
            all.retain(|local| local.interface == name);
        }
    }
    // MPI libraries spread the ranks of a host over all offered addresses, and not every address reaches every other
    // one: so without a requested address only one is offered.
    all.truncate(1);
    all
}

/// Zeroed memory that fi_freeinfo() frees.
fn zeroed<T>() -> *mut T {
    // SAFETY: calloc() takes any sizes, and its memory is aligned for every type.
    unsafe { libc::calloc(1, STRUCTURE.max(size_of::<T>())).cast() }
}

/// A copy that fi_freeinfo() frees; null without memory.
fn duplicate(bytes: &[u8]) -> *mut c_void {
    // SAFETY: malloc() gives memory for as many bytes as are copied, or null.
    unsafe {
        let copy = libc::malloc(bytes.len().max(1));
        if !copy.is_null() {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), copy.cast(), bytes.len());
        }
        copy
    }
}

fn text(text: &str) -> *mut c_char {
    CString::new(text).map_or(std::ptr::null_mut(), |text| duplicate(text.as_bytes_with_nul()).cast())
}

/// The offer for one address, in memory that fi_freeinfo() frees. Null without memory.
///
/// # Safety
/// The pointers of the hints are null or valid.
unsafe fn make(wanted: &Wanted<'_>, local: &Local) -> *mut Info {
    let info = zeroed::<Info>();
    // SAFETY: every structure is zeroed memory of its size at least, or null; this function's `# Safety` for the hints.
    unsafe {
        let Some(info_part) = info.as_mut() else { return info };
        let (tx, rx) = (zeroed::<TxAttr>(), zeroed::<RxAttr>());
        let (ep, domain, fabric) = (zeroed::<EpAttr>(), zeroed::<DomainAttr>(), zeroed::<FabricAttr>());
        (info_part.tx_attr, info_part.rx_attr, info_part.ep_attr) = (tx, rx, ep);
        (info_part.domain_attr, info_part.fabric_attr) = (domain, fabric);
        let [Some(tx), Some(rx), Some(ep), Some(domain), Some(fabric)] = [
            tx.as_mut().map(Part::Tx),
            rx.as_mut().map(Part::Rx),
            ep.as_mut().map(Part::Ep),
            domain.as_mut().map(Part::Domain),
            fabric.as_mut().map(Part::Fabric),
        ] else {
            // fi_freeinfo() is libfabric's; without memory a few bytes more do not matter.
            return std::ptr::null_mut();
        };
        fill(info_part, wanted, local);
        for part in [tx, rx, ep, domain, fabric] {
            part.fill(info_part.caps, wanted, local);
        }
    }
    info
}

/// A part of fi_info that is to be filled.
enum Part<'a> {
    Tx(&'a mut TxAttr),
    Rx(&'a mut RxAttr),
    Ep(&'a mut EpAttr),
    Domain(&'a mut DomainAttr),
    Fabric(&'a mut FabricAttr),
}

fn fill(info: &mut Info, wanted: &Wanted<'_>, local: &Local) {
    let asked = wanted.hints.map_or(0, |hints| hints.caps);
    // Without hints all capabilities are offered. MSG and TAGGED without a direction mean both directions.
    info.caps =
        if asked == 0 { CAPS } else { asked | CAPS & !ON_REQUEST & directions(asked) | caps::LOCAL_COMM | caps::REMOTE_COMM };
    info.addr_format = if local.address.is_ipv4() { format::SOCKADDR_IN } else { format::SOCKADDR_IN6 };
    let source = to_bytes(SocketAddr::new(local.address, wanted.source.map_or(0, |source| source.port())));
    (info.src_addr, info.src_addrlen) = (duplicate(&source), source.len());
    if let Some(destination) = wanted.destination {
        let bytes = to_bytes(destination);
        (info.dest_addr, info.dest_addrlen) = (duplicate(&bytes), bytes.len());
    }
}

/// The directions that capabilities without one imply.
fn directions(asked: u64) -> u64 {
    let named = asked & (caps::SEND | caps::RECV | caps::READ | caps::WRITE | caps::REMOTE_READ | caps::REMOTE_WRITE);
    let messages = if asked & (caps::MSG | caps::TAGGED) != 0 { caps::SEND | caps::RECV } else { 0 };
    let memory = if asked & caps::RMA != 0 { caps::READ | caps::WRITE | caps::REMOTE_READ | caps::REMOTE_WRITE } else { 0 };
    let of_messages = if named & (caps::SEND | caps::RECV) == 0 { messages } else { 0 };
    let of_memory = if named & !(caps::SEND | caps::RECV) == 0 { memory } else { 0 };
    of_messages | of_memory
}

impl Part<'_> {
    /// # Safety
    /// The pointers of the hints are null or valid.
    unsafe fn fill(self, caps: u64, wanted: &Wanted<'_>, local: &Local) {
        let defaults = Settings::default();
        match self {
            Part::Tx(tx) => {
                tx.caps = caps & (SENDING | caps::MSG | caps::TAGGED | caps::RMA);
                (tx.msg_order, tx.inject_size, tx.size) = (ORDER_SAS, INJECT, defaults.sends.into());
                (tx.iov_limit, tx.rma_iov_limit) = (PARTS, 1);
                // SAFETY: this function's `# Safety`.
                if let Some(asked) = wanted.hints.and_then(|hints| unsafe { attributes(hints.tx_attr) }) {
                    (tx.op_flags, tx.tclass) = (asked.op_flags, asked.tclass);
                }
            }
            Part::Rx(rx) => {
                rx.caps = caps & (RECEIVING | caps::MSG | caps::TAGGED | caps::RMA);
                (rx.msg_order, rx.size, rx.iov_limit) = (ORDER_SAS, defaults.receives.into(), PARTS);
                // SAFETY: `hints.rx_attr` is null or valid (`# Safety`).
                if let Some(asked) = wanted.hints.and_then(|hints| unsafe { attributes(hints.rx_attr) }) {
                    rx.op_flags = asked.op_flags;
                }
            }
            Part::Ep(ep) => {
                (ep.kind, ep.protocol_version, ep.max_msg_size) = (EP_RDM, 1, MAX_LENGTH as usize);
                (ep.tx_ctx_cnt, ep.rx_ctx_cnt) = (1, 1);
                // SAFETY: `hints.ep_attr` is null or valid (`# Safety`).
                let asked = wanted.hints.and_then(|hints| unsafe { attributes(hints.ep_attr) }).map_or(0, |ep| ep.mem_tag_format);
                // All 64 bits of a tag are the program's, in any format.
                ep.mem_tag_format = if asked == 0 { 0xaaaa_aaaa_aaaa_aaaa } else { asked };
            }
            Part::Domain(domain) => {
                // SAFETY: `hints.domain_attr` is null or valid (`# Safety`).
                let asked = wanted.hints.and_then(|hints| unsafe { attributes(hints.domain_attr) });
                domain.name = text(&local.interface);
                domain.fill(asked);
            }
            Part::Fabric(fabric) => fabric.name = text(FABRIC),
        }
    }
}

impl DomainAttr {
    fn fill(&mut self, asked: Option<&DomainAttr>) {
        let either = |wish: Option<c_int>, ours: c_int| wish.filter(|wish| *wish != 0).unwrap_or(ours);
        // Any thread may call any function, so every weaker threading model is fine, too.
        self.threading = either(asked.map(|asked| asked.threading), THREAD_SAFE);
        (self.control_progress, self.data_progress, self.resource_mgmt) = (PROGRESS_AUTO, PROGRESS_AUTO, RM_ENABLED);
        self.av_type = either(asked.map(|asked| asked.av_type), AV_TABLE);
        // Keys may be the provider's or the program's, addresses virtual or offsets: as requested.
        self.mr_mode =
            asked.map_or(0, |asked| asked.mr_mode & (mr::BASIC | mr::SCALABLE | mr::VIRT_ADDR | mr::ALLOCATED | mr::PROV_KEY));
        (self.mr_key_size, self.cq_data_size) = (8, CQ_DATA);
        (self.cq_cnt, self.ep_cnt, self.cntr_cnt, self.mr_cnt) = (MANY, 256, MANY, MANY);
        (self.tx_ctx_cnt, self.rx_ctx_cnt, self.max_ep_tx_ctx, self.max_ep_rx_ctx) = (256, 256, 1, 1);
        (self.mr_iov_limit, self.caps) = (PARTS, caps::LOCAL_COMM | caps::REMOTE_COMM);
    }
}
