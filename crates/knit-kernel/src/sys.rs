//! The system calls that have no safe wrapper elsewhere. All `unsafe` of namespaces and netlink is in here.
#![allow(unsafe_code, reason = "this module is where unsafe lives; each block says why it is sound")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `NS_GET_NSTYPE` of linux/nsfs.h: which kind of namespace a file descriptor refers to.
const NS_GET_NSTYPE: libc::Ioctl = 0xb703;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Gives memory that was freed back to the system; where the C library has no such call, it does so by
/// itself.
pub(crate) fn release_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) takes no pointers, and may be called from any thread at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Lets threads share this many heaps instead of each having its own, where the C library does that.
pub(crate) fn share_heaps(count: i32) {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt(3) takes no pointers; it is called before other threads are started, as it asks for.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, count);
    }
    #[cfg(not(target_env = "gnu"))]
    let _ = count;
}

/// Opens and binds a netlink socket in the calling thread's network namespace; the kernel picks the port.
pub(crate) fn netlink_socket(protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: socket(2) takes no pointers.
    let raw =
        check(unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) })?;
    // SAFETY: the descriptor was just returned by the kernel and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    // SAFETY: sockaddr_nl is plain data for which all zeroes is a valid value.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
    let length = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
    // SAFETY: the pointer and the length describe `address`, which outlives the call.
    check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) })?;
    Ok(fd)
}

/// Opens a socket for whole Ethernet frames of one protocol on one link of the calling thread's network
/// namespace.
pub(crate) fn packet_socket(protocol: u16, interface: u32) -> io::Result<OwnedFd> {
    // Without a protocol until it is bound: it hears nothing of other links.
    // SAFETY: socket(2) takes no pointers.
    let raw = check(unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the descriptor was just returned by the kernel and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    // SAFETY: sockaddr_ll is plain data for which all zeroes is a valid value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as libc::sa_family_t;
    address.sll_protocol = protocol.to_be();
    address.sll_ifindex = index(interface)?;
    let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the pointer and the length describe `address`, which outlives the call.
    check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) })?;
    Ok(fd)
}

/// Has a link take in frames to a multicast address for as long as the socket is open.
pub(crate) fn packet_join(fd: BorrowedFd<'_>, interface: u32, group: [u8; 6]) -> io::Result<()> {
    let mut mr_address = [0; 8];
    mr_address[..6].copy_from_slice(&group);
    let membership = libc::packet_mreq {
        mr_ifindex: index(interface)?,
        mr_type: libc::PACKET_MR_MULTICAST as libc::c_ushort,
        mr_alen: 6,
        mr_address,
    };
    let length = size_of::<libc::packet_mreq>() as libc::socklen_t;
    let value = (&raw const membership).cast();
    let (level, name) = (libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP);
    // SAFETY: the pointer and the length describe `membership`, which outlives the call.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, value, length) })?;
    Ok(())
}

/// A link's number as system calls take it.
fn index(interface: u32) -> io::Result<libc::c_int> {
    interface.try_into().map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

/// The port (address) that the kernel gave a netlink socket.
pub(crate) fn netlink_port(fd: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: sockaddr_nl is plain data for which all zeroes is a valid value.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
    // SAFETY: the pointers describe `address` and `length`, which outlive the call.
    check(unsafe { libc::getsockname(fd.as_raw_fd(), (&raw mut address).cast(), &raw mut length) })?;
    Ok(address.nl_pid)
}

/// Sets an integer socket option.
pub(crate) fn set_option(fd: BorrowedFd<'_>, level: i32, name: i32, value: i32) -> io::Result<()> {
    let length = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the pointer and the length describe `value`, which outlives the call.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), length) })?;
    Ok(())
}

/// Reads an integer socket option.
pub(crate) fn get_option(fd: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<i32> {
    let mut value: i32 = 0;
    let mut length = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the pointers describe `value` and `length`, which outlive the call.
    check(unsafe {
        libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut length)
    })?;
    Ok(value)
}

/// Sends bytes to the kernel's end of a netlink socket.
pub(crate) fn send(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: the pointer and the length describe `bytes`.
    let sent = unsafe { libc::send(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Receives one datagram without waiting. Returns its true length, which is more than the buffer's if it was
/// cut, and the sender's port: 0 is the kernel.
pub(crate) fn receive(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, u32)> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    // SAFETY: sockaddr_nl is plain data for which all zeroes is a valid value.
    let mut from: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
    let (bytes, size) = (buffer.as_mut_ptr().cast(), buffer.len());
    // SAFETY: pointers and lengths describe `buffer`, which is exclusively ours, `from` and `length`, all of
    // which outlive the call.
    let got = unsafe {
        libc::recvfrom(fd.as_raw_fd(), bytes, size, flags, (&raw mut from).cast(), &raw mut length)
    };
    let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    Ok((got, from.nl_pid))
}

/// The `CLONE_NEW*` flag of the namespace that a file descriptor refers to; ENOTTY if it is none.
pub(crate) fn namespace_type(fd: BorrowedFd<'_>) -> io::Result<i32> {
    // SAFETY: NS_GET_NSTYPE takes no argument.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), NS_GET_NSTYPE) })
}

/// Moves the calling thread to a new network namespace.
pub(crate) fn unshare_network() -> io::Result<()> {
    // SAFETY: unshare(2) takes no pointers; CLONE_NEWNET changes only the calling thread's namespace and none
    // of the state that Rust's standard library relies on.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
    Ok(())
}
