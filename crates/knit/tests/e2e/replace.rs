//! The agent is replaced while pods talk: they must not notice.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use knit_kernel::testing::eventually;

use crate::support::{Cluster, SOON, addresses, e2e};

/// Between packets of one stream.
const PACE: Duration = Duration::from_millis(2);

#[test]
fn no_packet_is_lost_while_the_agent_is_replaced_and_killed() {
    e2e(|| {
        let mut cluster = Cluster::started();
        let (client, _) = cluster.a.add("client", "blue");
        let (near, near_result) = cluster.a.add("near", "blue");
        let (far, far_result) = cluster.b.add("far", "blue");
        let (routed, routed_result) = cluster.b.add("routed", "green");
        // Default Network on one node and between two, switched and routed through tunnels.
        let targets = [
            (&near, addresses(&near_result, "eth0")[0]),
            (&near, addresses(&near_result, "eth0")[1]),
            (&far, addresses(&far_result, "eth0")[0]),
            (&far, addresses(&far_result, "net1")[0]),
            (&routed, addresses(&routed_result, "eth0")[1]),
        ];
        let streams: Vec<(UdpSocket, UdpSocket, SocketAddr)> = targets
            .iter()
            .enumerate()
            .map(|(n, (pod, to))| {
                let to = SocketAddr::new(*to, 7100 + u16::try_from(n).expect("few"));
                let any = if to.is_ipv4() { "0.0.0.0" } else { "::" };
                eventually("the way is open", SOON, || {
                    client.talks(&pod.space, to.ip(), Duration::from_millis(300))
                });
                let receiver = pod.space.run(|| UdpSocket::bind((any, to.port()))).expect("a visit");
                let sender = client.space.run(|| UdpSocket::bind((any, 0))).expect("a visit");
                (sender.expect("a socket"), receiver.expect("a socket"), to)
            })
            .collect();
        let (stop, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let sent: Vec<AtomicU64> = streams.iter().map(|_| AtomicU64::new(0)).collect();
        let received = std::thread::scope(|scope| {
            let receivers: Vec<_> = streams
                .iter()
                .map(|(_, receiver, _)| {
                    receiver.set_read_timeout(Some(Duration::from_secs(2))).expect("a timeout");
                    scope.spawn(|| {
                        let (mut got, mut next, mut buffer) = (0_u64, 0_u64, [0; 8]);
                        loop {
                            // Silence is the end only where nothing more is sent: the sender may have to wait
                            // its turn.
                            let last = over.load(Ordering::Relaxed);
                            if receiver.recv(&mut buffer).is_err() {
                                if last {
                                    return got;
                                }
                                continue;
                            }
                            let number = u64::from_be_bytes(buffer);
                            assert!(number >= next, "packet {number} after {next}: out of order or twice");
                            next = number + 1;
                            got += 1;
                        }
                    })
                })
                .collect();
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for ((sender, _, to), sent) in streams.iter().zip(&sent) {
                        let number = sent.load(Ordering::Relaxed);
                        sender.send_to(&number.to_be_bytes(), to).expect("sent");
                        sent.store(number + 1, Ordering::Relaxed);
                    }
                    // No catching up: a burst would overrun the receivers' buffers.
                    std::thread::park_timeout(PACE);
                }
                over.store(true, Ordering::Relaxed);
            });
            let enough = |more: u64| {
                let from = sent[0].load(Ordering::Relaxed);
                eventually("packets flow", SOON, || sent[0].load(Ordering::Relaxed) >= from + more);
            };
            enough(50);
            cluster.a.replace();
            enough(50);
            cluster.b.replace();
            enough(50);
            cluster.a.kill();
            enough(50);
            cluster.a.start();
            enough(50);
            stop.store(true, Ordering::Relaxed);
            receivers.into_iter().map(|r| r.join().expect("a receiver")).collect::<Vec<u64>>()
        });
        let sent: Vec<u64> = sent.iter().map(|s| s.load(Ordering::Relaxed)).collect();
        println!("packets sent on each stream: {sent:?}");
        assert_eq!(received, sent, "packets received on each stream");
        cluster.a.audit(&[("client", 2), ("near", 2)].into());
    });
}
