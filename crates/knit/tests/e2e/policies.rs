//! The agent is killed, again and again, while policies change: no packet goes against what holds throughout.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use knit_kernel::testing::eventually;
use serde_json::{Value, json};

use crate::support::{Cluster, Dice, Pod, SOON, addresses, e2e};

/// How often the agent is killed.
const KILLS: usize = 12;
const PORT: u16 = 7000;

/// What the server hears first of a datagram.
const FRIEND: u8 = 1;
const FOE: u8 = 2;

fn policy(name: &str, ingress: &Value) -> Value {
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": "shop", "name": name},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": ingress}})
}

/// Lets these addresses in at a port.
fn from(addresses: &[IpAddr], port: u16) -> Value {
    let blocks: Vec<Value> = addresses
        .iter()
        .map(|address| {
            let length = if address.is_ipv4() { 32 } else { 128 };
            json!({"ipBlock": {"cidr": format!("{address}/{length}")}})
        })
        .collect();
    json!([{"from": blocks, "ports": [{"protocol": "UDP", "port": port}]}])
}

/// A socket that has not sent anything: its first packet is judged. Port 0 is one that the kernel picks.
fn socket(pod: &Pod, to: IpAddr, port: u16) -> UdpSocket {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let bind = || UdpSocket::bind((any, port));
    let socket = pod.space.run(bind).expect("a visit").expect("a socket");
    socket.connect(SocketAddr::new(to, PORT)).expect("a peer");
    socket
}

#[test]
fn killed_at_random_while_policies_change_no_packet_is_misjudged() {
    e2e(|| {
        let mut cluster = Cluster::new();
        cluster.a.start();
        let ((server, served), (friend, known), (foe, _)) =
            (cluster.a.add("server", ""), cluster.a.add("friend", ""), cluster.a.add("foe", ""));
        let (to, known) = (addresses(&served, "eth0"), addresses(&known, "eth0"));
        cluster.put(&policy("stays", &from(&known, PORT)));
        let heard = [FRIEND, FOE].map(|_| AtomicUsize::new(0));
        let listener =
            server.space.run(|| UdpSocket::bind(("::", PORT))).expect("a visit").expect("a socket");
        listener.set_read_timeout(Some(std::time::Duration::from_millis(100))).expect("a timeout");
        let ended = AtomicBool::new(false);
        let (rounds, lost) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            let end = End(&ended);
            scope.spawn(|| {
                let mut buffer = [0; 8];
                while !ended.load(Ordering::Relaxed) {
                    let Ok((1.., peer)) = listener.recv_from(&mut buffer) else { continue };
                    heard[usize::from(buffer[0] - FRIEND)].fetch_add(1, Ordering::Relaxed);
                    // Who is gone wants no answer.
                    let _ = listener.send_to(&buffer[..1], peer);
                }
            });
            // A connection from before the policy is let in until it has been cut, for which no agent lives
            // long enough here. So these come from ports that the kernel picks for no other.
            let mut before_policy = 10_000..30_000;
            eventually("the policy is in force", SOON, || {
                let before = heard[1].load(Ordering::Relaxed);
                for to in &to {
                    let port = before_policy.next().expect("a port");
                    socket(&foe, *to, port).send(&[FOE]).expect("sent");
                }
                exchange(&friend, &to, SOON / 12) && heard[1].load(Ordering::Relaxed) == before
            });
            let before = heard[1].load(Ordering::Relaxed);
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    for to in &to {
                        socket(&foe, *to, 0).send(&[FOE]).expect("sent");
                    }
                    // It comes behind what must not arrive: once it is answered, that has been judged.
                    let answered = exchange(&friend, &to, SOON / 12);
                    lost.fetch_add(usize::from(!answered), Ordering::Relaxed);
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
            let mut dice = Dice::new(11);
            for kill in 0..KILLS {
                // One more that is not about this port, and one less.
                let others = [to[0], known[0]];
                cluster.put(&policy(&format!("beside-{}", kill % 3), &from(&others, 8000 + kill as u16)));
                if kill % 3 == 2 {
                    let gone = cluster.objects.join(format!("networkpolicy-beside-{}.json", (kill + 1) % 3));
                    std::fs::remove_file(gone).expect("it was there");
                }
                let until = rounds.load(Ordering::Relaxed) + usize::try_from(dice.below(40)).expect("few");
                eventually("packets are sent", SOON, || rounds.load(Ordering::Relaxed) >= until);
                cluster.a.kill();
                let until = rounds.load(Ordering::Relaxed) + 3;
                eventually("packets are sent without an agent", SOON, || {
                    rounds.load(Ordering::Relaxed) >= until
                });
                cluster.a.start();
            }
            drop(end);
            let (rounds, lost) = (rounds.load(Ordering::Relaxed), lost.load(Ordering::Relaxed));
            println!("{rounds} rounds of packets, {KILLS} kills");
            assert_eq!(heard[1].load(Ordering::Relaxed), before, "of {rounds} rounds, not one of the foe");
            assert_eq!(lost, 0, "of {rounds} rounds, all of the friend");
            assert!(rounds > 3 * KILLS, "{rounds} rounds are no stream");
        });
        // What was asked for last is in force.
        cluster.put(&policy("stays", &json!([])));
        eventually("nobody is let in", SOON, || {
            !exchange(&friend, &to, std::time::Duration::from_millis(300))
        });
    });
}

/// Ends the threads, also where the test fails: otherwise nobody would see why.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Whether the server answers a datagram of each family.
fn exchange(from: &Pod, to: &[IpAddr], wait: std::time::Duration) -> bool {
    to.iter().all(|to| {
        let socket = socket(from, *to, 0);
        socket.set_read_timeout(Some(wait)).expect("a timeout");
        socket.send(&[FRIEND]).is_ok() && socket.recv(&mut [0; 8]).is_ok()
    })
}
