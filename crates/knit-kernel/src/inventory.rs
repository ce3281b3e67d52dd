//! What sysfs says of a machine's network devices: where each sits, who drives it, how fast it is. Reads
//! files only, below a root that a test may fake.
//!
//! sysfs shows the devices of the network namespace that it was mounted in: one that is in a pod is not
//! listed, though its PCI device is still there.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where sysfs usually is.
pub const SYS: &str = "/sys";

/// A network device.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NetDevice {
    /// The interface's name.
    pub name: String,
    /// Its address on the PCI bus, and where that is.
    pub pci: Option<PciAddress>,
    /// The kernel's driver, such as `mlx5_core`.
    pub driver: Option<String>,
    /// Whether it is hardware, or stands for some: such a device goes back to the machine when the namespace
    /// that it is in ends, while the others are destroyed with it.
    pub physical: bool,
    /// The physical function that this is a virtual function of, by its PCI address.
    pub physical_function: Option<String>,
    /// In Mbit/s, while it has a link.
    pub speed: Option<u32>,
    /// How it is.
    pub state: OperState,
    /// The largest packet.
    pub mtu: Option<u32>,
    /// The hardware address, as sysfs writes it.
    pub mac: Option<String>,
}

/// Where a device sits.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PciAddress {
    /// Domain, bus, device and function: `0000:3b:00.0`.
    pub bus_id: String,
    /// The root complex that it is below: `pci0000:3a`. Devices with the same one reach each other without
    /// crossing to another socket.
    pub root: String,
    /// The NUMA node, where the machine has several.
    pub numa_node: Option<u32>,
}

/// What an interface's operational state is (RFC 2863).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum OperState {
    /// Packets pass.
    Up,
    /// It is set down, or has no carrier.
    Down,
    /// Its driver does not say; virtual ones mostly.
    Unknown,
}

/// All network devices, by name. One that vanishes meanwhile is left out.
///
/// # Errors
/// When the list itself cannot be read.
pub fn list(sys: &Path) -> io::Result<BTreeMap<String, NetDevice>> {
    let mut devices = BTreeMap::new();
    for entry in fs::read_dir(sys.join("class/net"))? {
        let name = entry?.file_name();
        // Files such as bonding_masters are not devices.
        let Some(device) = name.to_str().and_then(|name| read(sys, name).transpose()) else { continue };
        match device {
            Ok(device) => _ = devices.insert(device.name.clone(), device),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(devices)
}

/// One network device; none if there is no such device.
///
/// # Errors
/// When it is there and cannot be read.
pub fn read(sys: &Path, name: &str) -> io::Result<Option<NetDevice>> {
    if name.is_empty() || name == "." || name == ".." || name.contains('/') {
        return Ok(None);
    }
    let place = match fs::canonicalize(sys.join("class/net").join(name)) {
        Ok(place) if place.is_dir() => place,
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let below = fs::canonicalize(sys)?.join("devices");
    // By a full path, `devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/net/eth0`.
    let path = place.strip_prefix(&below).map(Path::to_path_buf).unwrap_or_default();
    let steps: Vec<&str> = path.iter().filter_map(|step| step.to_str()).collect();
    let device = place.join("device");
    let base = |link: PathBuf| {
        fs::canonicalize(link).ok()?.file_name().and_then(|name| name.to_str()).map(str::to_owned)
    };
    let bus = steps.iter().rposition(|step| is_pci_address(step));
    let pci = bus.zip(steps.first()).map(|(bus, root)| {
        let folder = below.join(steps[..=bus].iter().collect::<PathBuf>());
        let numa = text(&folder.join("numa_node")).and_then(|node| node.parse::<i64>().ok());
        PciAddress {
            bus_id: steps[bus].to_owned(),
            root: (*root).to_owned(),
            // A machine with one node says -1.
            numa_node: numa.and_then(|node| u32::try_from(node).ok()),
        }
    });
    Ok(Some(NetDevice {
        name: name.to_owned(),
        pci,
        driver: base(device.join("driver")),
        physical: device.exists() && steps.first() != Some(&"virtual"),
        physical_function: base(device.join("physfn")).filter(|name| is_pci_address(name)),
        // Without a link it is -1, or cannot be read at all.
        speed: text(&place.join("speed"))
            .and_then(|speed| speed.parse::<i64>().ok())
            .and_then(|speed| u32::try_from(speed).ok())
            .filter(|speed| *speed > 0 && *speed != u32::MAX),
        state: match text(&place.join("operstate")).as_deref() {
            Some("up") => OperState::Up,
            Some("down" | "lowerlayerdown" | "dormant" | "notpresent" | "testing") => OperState::Down,
            _ => OperState::Unknown,
        },
        mtu: text(&place.join("mtu")).and_then(|mtu| mtu.parse().ok()),
        mac: text(&place.join("address")).filter(|mac| !mac.is_empty()),
    }))
}

fn text(file: &Path) -> Option<String> {
    fs::read_to_string(file).ok().map(|text| text.trim().to_owned())
}

/// Whether a step of a path is a PCI address: four or more hexadecimal digits, two, two and one.
fn is_pci_address(step: &str) -> bool {
    let Some((domain, rest)) = step.split_once(':') else { return false };
    let Some((bus, rest)) = rest.split_once(':') else { return false };
    let Some((device, function)) = rest.split_once('.') else { return false };
    let hex = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit());
    let sized = domain.len() >= 4 && bus.len() == 2 && device.len() == 2 && function.len() == 1;
    sized && [domain, bus, device, function].into_iter().all(hex)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    struct Sys(tempfile::TempDir);

    impl Sys {
        fn new() -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            fs::create_dir_all(folder.path().join("class/net")).expect("a folder");
            Self(folder)
        }

        fn root(&self) -> &Path {
            self.0.path()
        }

        /// A file, by its path below the root.
        fn file(&self, path: &str, content: &str) {
            let path = self.root().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            fs::write(path, content).expect("a file");
        }

        fn link(&self, path: &str, to: &str) {
            let path = self.root().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            symlink(to, path).expect("a link");
        }

        /// A device below this one of `devices`, or a virtual one.
        fn device(&self, name: &str, parent: Option<&str>) {
            let place = match parent {
                Some(parent) => format!("devices/{parent}/net/{name}"),
                None => format!("devices/virtual/net/{name}"),
            };
            self.file(&format!("{place}/operstate"), "up\n");
            self.file(&format!("{place}/mtu"), "1500\n");
            self.file(&format!("{place}/address"), "02:00:00:00:00:01\n");
            if parent.is_some() {
                self.link(&format!("{place}/device"), "../..");
            }
            self.link(&format!("class/net/{name}"), &format!("../../{place}"));
        }
    }

    #[test]
    fn a_card_behind_a_bridge() {
        let sys = Sys::new();
        let place = "pci0000:3a/0000:3a:00.0/0000:3b:00.0";
        sys.device("ens1f0", Some(place));
        sys.file(&format!("devices/{place}/numa_node"), "1\n");
        sys.file("bus/pci/drivers/mlx5_core/bind", "");
        sys.link(&format!("devices/{place}/driver"), "../../../../bus/pci/drivers/mlx5_core");
        sys.file(&format!("devices/{place}/net/ens1f0/speed"), "100000\n");
        let device = read(sys.root(), "ens1f0").expect("readable").expect("there");
        let pci = PciAddress { bus_id: "0000:3b:00.0".into(), root: "pci0000:3a".into(), numa_node: Some(1) };
        assert_eq!(device.pci, Some(pci));
        assert_eq!((device.driver.as_deref(), device.speed), (Some("mlx5_core"), Some(100_000)));
        assert!(device.physical && device.state == OperState::Up && device.mtu == Some(1500));
        assert_eq!(device.physical_function, None);
    }

    #[test]
    fn a_virtio_card_sits_one_step_below_its_pci_device() {
        let sys = Sys::new();
        sys.device("eth0", Some("pci0000:00/0000:00:03.0/virtio0"));
        sys.file("devices/pci0000:00/0000:00:03.0/numa_node", "-1\n");
        // A card without a link.
        sys.file("devices/pci0000:00/0000:00:03.0/virtio0/net/eth0/speed", "-1\n");
        sys.file("devices/pci0000:00/0000:00:03.0/virtio0/net/eth0/operstate", "down\n");
        let device = read(sys.root(), "eth0").expect("readable").expect("there");
        let pci = PciAddress { bus_id: "0000:00:03.0".into(), root: "pci0000:00".into(), numa_node: None };
        assert_eq!((device.pci, device.speed, device.state), (Some(pci), None, OperState::Down));
    }

    #[test]
    fn a_virtual_function_names_its_physical_one() {
        let sys = Sys::new();
        sys.device("ens1f0v0", Some("pci0000:3a/0000:3b:00.2"));
        sys.file("devices/pci0000:3a/0000:3b:00.0/vendor", "");
        sys.link("devices/pci0000:3a/0000:3b:00.2/physfn", "../0000:3b:00.0");
        let device = read(sys.root(), "ens1f0v0").expect("readable").expect("there");
        assert_eq!(device.physical_function.as_deref(), Some("0000:3b:00.0"));
    }

    #[test]
    fn what_is_virtual_is_not_physical_and_what_is_not_a_device_is_left_out() {
        let sys = Sys::new();
        sys.device("veth1", None);
        sys.device("eth0", Some("pci0000:00/0000:00:03.0"));
        sys.file("class/net/bonding_masters", "\n");
        sys.link("class/net/vanished", "../../devices/virtual/net/vanished");
        let devices = list(sys.root()).expect("a list");
        assert_eq!(devices.keys().map(String::as_str).collect::<Vec<_>>(), ["eth0", "veth1"]);
        assert!(!devices["veth1"].physical && devices["veth1"].pci.is_none());
        assert!(devices["eth0"].physical);
        for name in ["", ".", "..", "../net/eth0", "eth0/", "/etc", "nowhere"] {
            assert_eq!(read(sys.root(), name).expect("readable"), None, "{name:?}");
        }
    }

    #[test]
    fn addresses_on_the_bus_are_told_from_other_steps() {
        for good in ["0000:3b:00.0", "10000:e1:00.7", "0000:ff:1f.a"] {
            assert!(is_pci_address(good), "{good}");
        }
        for bad in
            ["pci0000:3a", "virtio0", "0000:3b:00", "000:3b:00.0", "0000:3b:000.0", "0000:3g:00.0", "net"]
        {
            assert!(!is_pci_address(bad), "{bad}");
        }
    }

    #[test]
    fn this_machine_has_a_loopback() {
        let Ok(devices) = list(Path::new(SYS)) else { return crate::testing::skip("there is no sysfs here") };
        assert!(devices.get("lo").is_some_and(|lo| !lo.physical));
    }
}
