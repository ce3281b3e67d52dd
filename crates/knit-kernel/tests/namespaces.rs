//! Namespaces, the netlink socket, and the helper that all other tests stand on.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use knit_kernel::netlink::{Batch, Error, Protocol, Socket, flags};
use knit_kernel::netns::{self, NetNs};
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_kernel::testing::{eventually, in_namespaces, namespace, privileged, skip, skip_for_kernel};
use knit_kernel::{Handle, IfName};
use knit_nft::Nftables as _;
use rustix::thread::CapabilitySet;

const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const IFA_LOCAL: u16 = 2;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const RTNLGRP_LINK: u32 = 1;

fn add_bridge(batch: &mut Batch, name: &str) {
    batch.push(RTM_NEWLINK, flags::CREATE | flags::EXCL, |w| {
        w.fixed(&[0; 16]).string(IFLA_IFNAME, name).nested(IFLA_LINKINFO, |w| {
            w.string(IFLA_INFO_KIND, "bridge");
        });
    });
}

fn link_names(socket: &mut Socket) -> Vec<String> {
    let each = |names: &mut Vec<String>, message: knit_kernel::netlink::Message<'_>| {
        let (_, attrs) = message.split::<16>()?;
        names.extend(attrs.get(IFLA_IFNAME).map(|name| name.string()));
        Ok(())
    };
    let mut names =
        socket.dump(RTM_GETLINK, |w| _ = w.fixed(&[0; 16]), Vec::new, each).expect("links can be listed");
    names.sort();
    names
}

#[test]
fn a_test_is_root_in_its_own_empty_network() {
    let outside = NetNs::current().expect("there is a current namespace").id();
    println!("outside {outside}");
    in_namespaces(|| {
        assert!(rustix::process::geteuid().is_root());
        let mut socket = Socket::open(Protocol::Route).expect("a route socket");
        assert_eq!(link_names(&mut socket), ["lo"]);
        assert_eq!(std::fs::read_dir("/run").expect("/run is there").count(), 0);
        let echo = UdpSocket::bind("127.0.0.1:0").expect("lo is up");
        echo.send_to(b"x", echo.local_addr().expect("bound")).expect("lo carries packets");
    });
}

#[test]
fn a_thread_at_home_needs_no_privilege_to_open_its_own_namespace() {
    in_namespaces(|| {
        let other = namespace();
        let mut sets = rustix::thread::capabilities(None).expect("capabilities");
        sets.effective = CapabilitySet::NET_ADMIN;
        sets.permitted = CapabilitySet::NET_ADMIN;
        rustix::thread::set_capabilities(None, sets).expect("one may have less");
        let here = Handle::current().expect("a handle");
        let current = NetNs::current().expect("current").id();
        assert!(here.namespace().id() == current && other.id() != current);
        here.index_of(&IfName::new("lo").expect("a name")).expect("lo");
        knit_kernel::nft::Kernel::open_in(here.namespace()).expect("nftables").tables().expect("a listing");
        let sysctls = Sysctls::of(here.namespace()).expect("sysctls");
        sysctls.set(&Sysctl::ipv4_forwarding(), 1).expect("set");
        let refused = Handle::open(&other).expect_err("another one is out of reach");
        let said = std::iter::successors(Some(&refused as &dyn std::error::Error), |e| e.source());
        assert!(said.map(ToString::to_string).any(|text| text.contains("CAP_SYS_ADMIN")), "{refused:?}");
    });
}

#[test]
#[should_panic(expected = "failed in its namespaces")]
fn a_failure_inside_fails_the_test() {
    in_namespaces(|| {
        // The inner process must fail for another reason than the one that the outer one expects.
        eprintln!("this failure is wanted");
        std::process::exit(3);
    });
    // Reached where namespaces are forbidden; it must then look as expected.
    if NetNs::unnamed().is_err() {
        panic!("skipped; otherwise it would have failed in its namespaces");
    }
}

const SKIPPING: [&str; 3] = ["skips_at_once", "skips_in_namespaces", "skips_for_the_kernel"];

#[test]
#[ignore = "the two tests below run it"]
fn skips_at_once() {
    skip("no such program");
}

#[test]
#[ignore = "the two tests below run it"]
fn skips_in_namespaces() {
    in_namespaces(|| skip("no such file"));
}

#[test]
#[ignore = "the two tests below run it"]
fn skips_for_the_kernel() {
    skip_for_kernel("such module");
}

/// Runs those above with this value of `KNIT_TEST_STRICT`; what they printed, and which of them passed.
fn skipping(strict: &str, skips: &std::path::Path) -> (String, Vec<&'static str>) {
    let output = std::process::Command::new("/proc/self/exe")
        .args(["--ignored", "--exact"])
        .args(SKIPPING)
        .env("KNIT_TEST_STRICT", strict)
        .env("KNIT_TEST_SKIPS", skips)
        .output()
        .expect("this program runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let passed = |name: &&str| said.contains(&format!("test {name} ... ok\n"));
    let passed = SKIPPING.into_iter().filter(passed).collect();
    (said, passed)
}

#[test]
fn a_skip_is_a_failure_where_everything_must_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let skips = folder.path().join("skips");
    let (said, passed) = skipping("all", &skips);
    assert_eq!(passed, [""; 0], "{said}");
    assert!(said.contains("KNIT_TEST_STRICT is all, and this would be skipped: no such program"), "{said}");
    assert!(said.contains("this would be skipped: this kernel has no such module"), "{said}");
    assert!(!skips.exists(), "failures are not skips");
    // Nobody can install another kernel's features.
    let (said, passed) = skipping("1", &skips);
    assert_eq!(passed, ["skips_for_the_kernel"], "{said}");
    let (said, passed) = skipping("yes", &skips);
    assert!(passed.is_empty() && said.contains("it can be 0, 1 or all"), "{said}");
}

#[test]
fn skips_of_tests_that_pass_are_listed_in_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let skips = folder.path().join("skips");
    for strict in ["", "0"] {
        let (said, passed) = skipping(strict, &skips);
        assert_eq!(passed, SKIPPING, "{said}");
    }
    let listed = std::fs::read_to_string(&skips).expect("a list");
    assert_eq!(listed.matches("skips_at_once: no such program\n").count(), 2, "{listed}");
    assert_eq!(listed.matches("skips_in_namespaces: ").count(), 2, "{listed}");
    assert_eq!(listed.lines().count(), 6, "{listed}");
}

#[test]
fn real_root_keeps_its_user_namespace() {
    privileged(|| {
        let map = std::fs::read_to_string("/proc/self/uid_map").expect("a map");
        assert!(map.split_whitespace().eq(["0", "0", "4294967295"]), "{map}");
    });
}

#[test]
fn named_namespaces_come_and_go() {
    in_namespaces(|| {
        let dir = std::path::Path::new("/run/netns");
        assert_eq!(NetNs::list(dir).expect("a missing directory holds none"), []);
        std::fs::create_dir(dir).expect("mkdir");
        let path = dir.join("blue");
        assert!(NetNs::open(&path).expect_err("not there").is_not_found());
        let blue = NetNs::create(&path).expect("create");
        assert_ne!(blue.id(), NetNs::current().expect("current").id());
        assert!(NetNs::create(&path).expect_err("there already").is_exists());
        assert_eq!(NetNs::ensure(&path).expect("ensure").id(), blue.id());
        assert_eq!(NetNs::list(dir).expect("list"), [("blue".to_owned(), blue.id())]);
        let inside = blue.run(|| NetNs::current().expect("current").id()).expect("run");
        assert_eq!(inside, blue.id());

        // A leftover of a crash between the file and the mount is taken over; anything else is not.
        std::fs::write(dir.join("left"), "").expect("write");
        assert_eq!(NetNs::list(dir).expect("list").len(), 1);
        NetNs::create(dir.join("left")).expect("an empty file is taken over");
        std::fs::write(dir.join("data"), "mine").expect("write");
        let error = NetNs::create(dir.join("data")).expect_err("somebody's file");
        assert!(matches!(error, netns::Error::NotANamespace { .. }), "{error}");
        let error = NetNs::delete(dir.join("data")).expect_err("somebody's file");
        assert!(matches!(error, netns::Error::NotANamespace { .. }), "{error}");
        assert_eq!(std::fs::read_to_string(dir.join("data")).expect("still there"), "mine");
        let error = NetNs::open("/proc/self/ns/mnt").expect_err("another kind of namespace");
        assert!(matches!(error, netns::Error::NotANamespace { .. }), "{error}");

        assert!(NetNs::delete(&path).expect("delete"));
        assert!(!NetNs::delete(&path).expect("deleting again is fine"));
        assert!(!path.exists());
        assert!(NetNs::open(&path).expect_err("gone").is_not_found());
    });
}

#[test]
fn namespaces_open_by_process_and_descriptor() {
    in_namespaces(|| {
        let me = NetNs::of_process(std::process::id()).expect("my own");
        assert_eq!(me.id(), NetNs::current().expect("current").id());
        let fd = std::fs::File::open("/proc/self/ns/net").expect("open");
        assert_eq!(NetNs::from_fd(fd.into()).expect("from fd").id(), me.id());
        let file = std::fs::File::open("/proc/self/status").expect("open");
        assert!(matches!(NetNs::from_fd(file.into()), Err(netns::Error::NotANamespace { .. })));
        assert!(NetNs::of_process(u32::MAX / 4).expect_err("no such process").is_not_found());
        let other = namespace();
        assert_ne!(other.id(), me.id());
        assert_eq!(other.try_clone().expect("clone").id(), other.id());
    });
}

#[test]
fn a_shared_directory_is_shared_once() {
    in_namespaces(|| {
        for _ in 0..2 {
            NetNs::share_directory("/run/knit/netns").expect("share");
        }
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let ours: Vec<_> = mounts.lines().filter(|line| line.contains(" /run/knit/netns ")).collect();
        assert_eq!(ours.len(), 1, "{ours:?}");
        assert!(ours[0].contains("shared:"), "{ours:?}");
        NetNs::create("/run/knit/netns/a").expect("create");
        assert!(NetNs::delete("/run/knit/netns/a").expect("delete"));
    });
}

#[test]
fn a_socket_stays_where_it_was_opened() {
    in_namespaces(|| {
        let other = namespace();
        let mut here = Socket::open(Protocol::Route).expect("open");
        let mut there = Socket::open_in(Protocol::Route, &other).expect("open in");
        let mut batch = Batch::new();
        add_bridge(&mut batch, "br0");
        assert_eq!(there.request(&mut batch).expect("request").refused, []);
        assert_eq!(link_names(&mut there), ["br0", "lo"]);
        assert_eq!(link_names(&mut here), ["lo"]);
        // The thread that opened it went home: nothing but the socket and `other` keep the namespace.
        assert_eq!(
            NetNs::current().expect("current").id(),
            NetNs::of_process(std::process::id()).expect("own").id()
        );
    });
}

#[test]
fn a_batch_is_carried_out_in_order_and_refusals_name_their_place() {
    in_namespaces(|| {
        let mut socket = Socket::open(Protocol::Route).expect("open");
        let mut batch = Batch::new();
        for name in ["a", "b", "a", "c"] {
            add_bridge(&mut batch, name);
        }
        // An attribute that the kernel dislikes, with its own words and place.
        let bad = batch.push(RTM_NEWLINK, flags::CREATE | flags::EXCL, |w| {
            w.fixed(&[0; 16]).string(IFLA_IFNAME, "d").nested(IFLA_LINKINFO, |w| {
                w.string(IFLA_INFO_KIND, "no-such-kind");
            });
        });
        let answers = socket.request(&mut batch).expect("the batch is sent");
        let places: Vec<_> =
            answers.refused.iter().map(|(place, refusal)| (*place, refusal.errno.0)).collect();
        assert_eq!(places, [(2, libc::EEXIST), (bad, libc::EOPNOTSUPP)]);
        assert!(answers.refused[0].1.is_exists());
        let said = answers.refused[1].1.to_string();
        assert!(answers.refused[1].1.message.is_some(), "{said}");
        assert_eq!(link_names(&mut socket), ["a", "b", "c", "lo"]);

        let mut batch = Batch::new();
        batch.push(RTM_DELLINK, 0, |w| _ = w.fixed(&[0; 16]).string(IFLA_IFNAME, "zz"));
        let error = socket.request(&mut batch).expect("sent").all().expect_err("no such link");
        assert!(error.is_not_found() && !error.is_retryable(), "{error}");
        assert!(matches!(error, Error::Refused(_)));
        assert_eq!(socket.request(&mut Batch::new()).expect("nothing to do").refused, []);
    });
}

#[test]
fn an_echo_returns_what_was_made() {
    in_namespaces(|| {
        let mut socket = Socket::open(Protocol::Route).expect("open");
        let mut batch = Batch::new();
        // An address of lo; links are echoed only since Linux 6.2.
        batch.push(RTM_NEWADDR, flags::CREATE | flags::EXCL | flags::ECHO, |w| {
            w.fixed(&[2, 32, 0, 0, 1, 0, 0, 0]).bytes(IFA_LOCAL, &[192, 0, 2, 7]);
        });
        let replies = socket.request(&mut batch).expect("sent").all().expect("made");
        assert_eq!(
            replies.iter().map(|(place, kind, _)| (*place, *kind)).collect::<Vec<_>>(),
            [(0, RTM_NEWADDR)]
        );
    });
}

#[test]
fn notifications_arrive_and_waiting_ends() {
    in_namespaces(|| {
        let mut events = Socket::open(Protocol::Route).expect("open");
        events.subscribe(RTNLGRP_LINK).expect("subscribe");
        let soon = Instant::now() + Duration::from_millis(20);
        assert!(!events.receive(Some(soon), |_| {}).expect("nothing happens"));
        let mut socket = Socket::open(Protocol::Route).expect("open");
        let mut batch = Batch::new();
        add_bridge(&mut batch, "br0");
        socket.request(&mut batch).expect("sent").all().expect("made");
        let mut seen = Vec::new();
        let late = Instant::now() + Duration::from_secs(60);
        assert!(events.receive(Some(late), |m| seen.push((m.kind, m.sequence))).expect("an event"));
        assert_eq!(seen, [(RTM_NEWLINK, 0)]);
    });
}

#[test]
fn buffers_are_raised_as_far_as_allowed() {
    in_namespaces(|| {
        let socket = Socket::open(Protocol::Netfilter).expect("open");
        let before = socket.raise_send_buffer(1).expect("read");
        assert!(socket.raise_send_buffer(1 << 20).expect("raise") >= before);
        assert!(socket.raise_receive_buffer(1 << 20).expect("raise") > 0);
    });
}

#[test]
fn eventually_waits_for_the_condition() {
    let start = Instant::now();
    eventually("three milliseconds pass", Duration::from_secs(5), || {
        start.elapsed() > Duration::from_millis(3)
    });
}

#[test]
#[should_panic(expected = "it never rains: not within")]
fn eventually_gives_up() {
    eventually("it never rains", Duration::from_millis(5), || false);
}

#[test]
fn an_answer_that_is_not_the_kernels_is_not_believed() {
    in_namespaces(|| {
        let mut socket = Socket::open(Protocol::Route).expect("a route socket");
        let liar = Socket::open(Protocol::Route).expect("another one");
        // Sequence numbers begin with 1: an answer to the first listing that is to come, with a link that is
        // not there.
        let mut lie = Batch::new();
        lie.push(RTM_NEWLINK, 0, |w| _ = w.fixed(&[0; 16]).string(IFLA_IFNAME, "evil0"));
        let mut bytes = lie.as_bytes().to_vec();
        bytes[8..12].copy_from_slice(&1u32.to_ne_bytes());
        let to = rustix::net::netlink::SocketAddrNetlink::new(socket.port(), 0);
        rustix::net::sendto(&liar, &bytes, rustix::net::SendFlags::empty(), &to).expect("sent");
        assert_eq!(link_names(&mut socket), ["lo"]);
    });
}
