//! Queues: what is written is read back, changes in place, and slows packets down.

mod support;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use knit_kernel::link::{Change, NewLink};
use knit_kernel::qdisc::{Arrivals, Qdisc, Redirect, TokenBucket};
use knit_kernel::testing::in_namespaces;
use knit_kernel::{Handle, Op};
use support::*;

/// 40 Mbit/s: slow enough for a busy machine, fast enough for a test.
const RATE: u64 = 5_000_000;
const BURST: u32 = 64 << 10;
const BYTES: usize = 2_000_000;

fn bucket(interface: u32, rate: u64) -> TokenBucket {
    TokenBucket { interface, rate, burst: BURST, limit: 200_000 }
}

/// Sends some bytes by TCP to `address` in `there`; says how long that takes.
fn send(here: &Handle, there: &Handle, address: &str) -> Duration {
    let listener = there.namespace().run(|| TcpListener::bind(SocketAddr::new(ip(address), 0)));
    let listener = listener.expect("enter").expect("bind");
    let target = listener.local_addr().expect("bound");
    let receiver = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("accepted");
        let (mut buffer, mut left) = (vec![0; 1 << 16], BYTES);
        while left > 0 {
            let length = stream.read(&mut buffer).expect("read");
            assert!(length > 0, "the sender hung up");
            left -= length;
        }
        stream.write_all(b"!").expect("told");
    });
    let begun = Instant::now();
    let mut stream = here.namespace().run(|| TcpStream::connect(target)).expect("enter").expect("connected");
    stream.write_all(&vec![7; BYTES]).expect("sent");
    stream.read_exact(&mut [0]).expect("all of it arrived");
    receiver.join().expect("received");
    begun.elapsed()
}

/// A machine that is busy makes it slower, never faster: the buckets' time is the least that it takes.
fn at_least(rate: u64) -> Duration {
    Duration::from_secs_f64((BYTES - BURST as usize) as f64 / rate as f64)
}

/// Whether bytes get there faster than a bucket lets them pass: a busy machine may need a few attempts for
/// that.
fn is_free(here: &Handle, there: &Handle, address: &str) -> bool {
    (0..100).any(|_| send(here, there, address) < at_least(RATE))
}

#[test]
fn a_link_sends_no_faster_than_its_bucket_and_changes_in_place() {
    in_namespaces(|| {
        let (here, there) = (node(), node());
        let (out, _) = wire(&here, "veth1", "10.0.0.1/24", &there, "10.0.0.2/24");
        assert!(here.ensure(bucket(out, RATE)).expect("made"));
        assert!(!here.ensure(bucket(out, RATE)).expect("there already"));
        let found = here.qdiscs(Some(out)).expect("a list");
        let [Qdisc::TokenBucket(read)] = found[..] else { panic!("{found:?}") };
        assert_eq!((read.rate, read.limit), (RATE, 200_000));
        let took = send(&here, &there, "10.0.0.2");
        assert!(took >= at_least(RATE), "{took:?}");
        // The other way is free.
        assert!(is_free(&there, &here, "10.0.0.1"));
        // In place, and back.
        here.apply(&[Op::replace(bucket(out, 10 * RATE))]).expect("changed");
        let [Qdisc::TokenBucket(read)] = here.qdiscs(Some(out)).expect("a list")[..] else {
            panic!("one bucket")
        };
        assert_eq!(read.rate, 10 * RATE);
        let error = here.ensure(bucket(out, RATE)).expect_err("another rate is a conflict");
        assert!(error.to_string().contains("rate"), "{error}");
        // Beyond 32 bits.
        here.apply(&[Op::replace(bucket(out, 12_500_000_000))]).expect("100 Gbit/s");
        let [Qdisc::TokenBucket(read)] = here.qdiscs(Some(out)).expect("a list")[..] else {
            panic!("one bucket")
        };
        assert_eq!(read.rate, 12_500_000_000);
        assert!(here.remove(bucket(out, RATE)).expect("removed"));
        assert!(!here.remove(bucket(out, RATE)).expect("gone already"));
        assert_eq!(here.qdiscs(Some(out)).expect("a list"), []);
        bucket(out, 0).validate().expect_err("nothing would pass");
    });
}

#[test]
fn what_arrives_is_slowed_down_by_another_link() {
    in_namespaces(|| {
        let (here, there) = (node(), node());
        let (arrives, _) = wire(&here, "veth1", "10.0.0.1/24", &there, "10.0.0.2/24");
        let ifb = NewLink { up: true, ..NewLink::ifb(name("slow")) };
        let slow = here.create_link(&ifb).expect("an ifb").index;
        here.ensure_link(&ifb).expect("the same one");
        let redirect = Redirect { interface: arrives, to: slow };
        let ops = [
            Op::create(bucket(slow, RATE)),
            Op::create(Arrivals { interface: arrives }),
            Op::create(redirect),
        ];
        here.apply(&ops).expect("redirected");
        assert_eq!(here.redirects(arrives).expect("a list"), [redirect]);
        assert_eq!(
            here.qdiscs(Some(arrives)).expect("a list"),
            [Qdisc::Arrivals(Arrivals { interface: arrives })]
        );
        assert!(!here.ensure(redirect).expect("there already"));
        let took = send(&there, &here, "10.0.0.1");
        assert!(took >= at_least(RATE), "{took:?}");
        assert!(is_free(&here, &there, "10.0.0.2"));
        // Without it, what arrives is as fast as it comes.
        assert!(here.remove(redirect).expect("removed"));
        assert!(!here.remove(redirect).expect("gone already"));
        assert_eq!(here.redirects(arrives).expect("a list"), []);
        assert!(is_free(&there, &here, "10.0.0.1"));
        assert!(here.remove(Arrivals { interface: arrives }).expect("removed"));
        assert_eq!(here.qdiscs(Some(arrives)).expect("a list"), []);
        // A link that is down when its redirect is made lets nothing through; up, it does.
        here.apply(&[Op::create(Arrivals { interface: arrives }), Op::create(redirect)]).expect("again");
        here.apply(&[Change::of(slow).up().into()]).expect("up");
        must_reach(&there, &here, "10.0.0.1");
        // With the link goes what was on it.
        here.delete_link(slow).expect("deleted");
        Redirect { interface: 3, to: 3 }.validate().expect_err("to itself");
    });
}
