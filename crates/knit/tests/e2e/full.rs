//! A full disk: new pods are refused clearly, old ones stay and can go.

use std::io::Write as _;

use knit_kernel::testing::eventually;
use rustix::mount::{MountFlags, mount};

use crate::doctor::finds;
use crate::support::{Cluster, Pod, SOON, addresses, e2e};

#[test]
fn a_full_run_directory() {
    e2e(|| {
        let mut cluster = Cluster::new();
        // A run-time directory of its own, so small that it fills at once.
        std::fs::create_dir_all(&cluster.a.run).expect("a folder");
        mount("tmpfs", &cluster.a.run, "tmpfs", MountFlags::empty(), c"size=256k,mode=0700")
            .expect("a small disk");
        cluster.a.start();
        let node = &cluster.a;
        let (one, one_result) = node.add("one", "blue");
        let (two, _) = node.add("two", "");

        let ballast = node.run.join("ballast");
        let mut file = std::fs::File::create(&ballast).expect("a file");
        while file.write_all(&[0; 512]).is_ok() {}
        drop(file);
        // What is left of the ledger's last page may hold a few records more.
        let mut squeezed = Vec::new();
        let error = loop {
            let pod = Pod::new(&format!("late{}", squeezed.len()));
            let ran = node.cni("ADD", &pod, "");
            if !ran.ok {
                break ran.json;
            }
            squeezed.push(pod);
            assert!(squeezed.len() < 64, "the disk is never full");
        };
        let message = format!("{} {}", error["msg"], error["details"]);
        assert!(message.contains("space") || message.contains("full"), "{error}");
        finds(node, "space", "wrong", "new pods are refused");
        // Old ones stay, talk, and can go.
        assert!(two.talks(&one.space, addresses(&one_result, "eth0")[0], SOON));
        for pod in squeezed {
            node.del(&pod);
        }
        node.del(&two);
        assert!(node.in_kernel().iter().all(|(sandbox, _)| sandbox == "one"), "{:?}", node.in_kernel());
        std::fs::remove_file(&ballast).expect("removed");
        // With space again, the ledger is brought to what is there, at the latest by the next start.
        cluster.a.replace();
        let node = &cluster.a;
        node.audit(&[("one", 2)].into());
        let (three, _) = node.add("three", "green");
        node.audit(&[("one", 2), ("three", 2)].into());
        node.del(&three);
        node.del(&one);
        eventually("all is gone", SOON, || node.in_kernel().is_empty());
    });
}
