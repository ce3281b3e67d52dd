//! What keys and values of the rules consist of: addresses, ports, places, numbers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use knit_nft::{Data, Element, Family as Table};
use knit_proxy::model::{Family, Protocol};

/// The family of the table for a family of services.
pub(crate) fn table_family(family: Family) -> Table {
    match family {
        Family::V4 => Table::Ip,
        Family::V6 => Table::Ip6,
    }
}

/// The address that stands for any address of this node.
pub(crate) fn any(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    }
}

fn push_address(data: &mut Data, address: IpAddr) {
    match address {
        IpAddr::V4(v4) => data.push(&v4.octets()),
        IpAddr::V6(v6) => data.push(&v6.octets()),
    }
}

fn push_mark(data: &mut Data, mark: u32) {
    data.push(&mark.to_ne_bytes());
}

/// An address alone.
pub(crate) fn address(address: IpAddr) -> Data {
    let mut data = Data::new();
    push_address(&mut data, address);
    data
}

/// `address . protocol . port`: where clients connect to.
pub(crate) fn place(address: IpAddr, protocol: Protocol, port: u16) -> Data {
    let mut data = Data::new();
    push_address(&mut data, address);
    data.push_padded(&[protocol.number()]);
    data.push_padded(&port.to_be_bytes());
    data
}

/// `place . slot`.
pub(crate) fn slot(place: &Data, slot: u32) -> Data {
    let mut data = place.clone();
    push_mark(&mut data, slot);
    data
}

/// Reads a place and a slot back.
pub(crate) fn read_slot(data: &Data) -> Option<(Data, u32)> {
    let (place, slot) = data.as_slice().split_at_checked(data.len().checked_sub(4)?)?;
    Some((Data::from_slice(place), u32::from_ne_bytes(slot.try_into().ok()?)))
}

/// `address . port`: an endpoint.
pub(crate) fn target(address: IpAddr, port: u16) -> Data {
    let mut data = Data::new();
    push_address(&mut data, address);
    data.push_padded(&port.to_be_bytes());
    data
}

/// Numbers in a row.
pub(crate) fn marks<const N: usize>(numbers: [u32; N]) -> Data {
    let mut data = Data::new();
    numbers.into_iter().for_each(|number| push_mark(&mut data, number));
    data
}

/// `address . address`: an endpoint that calls itself.
pub(crate) fn pair(address: IpAddr) -> Data {
    let mut data = Data::new();
    push_address(&mut data, address);
    push_address(&mut data, address);
    data
}

/// `place . range`: who may use a place.
pub(crate) fn allowed(place: &Data, range: ipnet::IpNet) -> Element {
    let end = |address| {
        let mut data = place.clone();
        push_address(&mut data, address);
        data
    };
    let mut element = Element::from_data(end(range.network()));
    element.key_end = Some(Box::new(end(range.broadcast())));
    element
}

/// Reads an endpoint back.
pub(crate) fn read_target(data: &Data) -> Option<(IpAddr, u16)> {
    let bytes = data.as_slice();
    let port = |at: usize| Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
    match bytes.len() {
        8 => Some((IpAddr::from(<[u8; 4]>::try_from(&bytes[..4]).ok()?), port(4)?)),
        20 => Some((IpAddr::from(<[u8; 16]>::try_from(&bytes[..16]).ok()?), port(16)?)),
        _ => None,
    }
}

/// Reads numbers back.
pub(crate) fn read_marks<const N: usize>(data: &Data) -> Option<[u32; N]> {
    let bytes = data.as_slice();
    let mut numbers = [0; N];
    if bytes.len() != N * 4 {
        return None;
    }
    for (number, chunk) in numbers.iter_mut().zip(bytes.chunks_exact(4)) {
        *number = u32::from_ne_bytes(chunk.try_into().ok()?);
    }
    Some(numbers)
}
