//! What every runtime must do.

use std::net::SocketAddr;

use futures::future::join_all;
use knit_api::kni::v1alpha1 as wire;
use knit_kernel::addr::Address as KernelAddress;
use knit_kernel::link::Change;
use knit_kernel::{Handle, IfName, NetNs};
use knit_runtime::wire::{PROTOCOL_VERSION, error_detail, error_from_status};
use knit_runtime::{Attachment, Dns, InterfaceName, Pod, Reason, Route, Runtime as _, SandboxId, feature};
use knit_types::{ByFamily as _, Family};

use crate::bed::{Bed, TestPod, address_of, eth0};
use crate::case::{Problem, Verdict, cases, ensure};
use crate::packets::talk;

/// How many pods are attached at once.
const AT_ONCE: usize = 8;

/// A Network that nobody has set up.
const NOWHERE: &str = "knit-conformance-nowhere";

cases! {
    Core Capabilities capabilities "GetCapabilities returns name, version, protocol and known features"
    Core StatusReady status_ready "Status reports that the runtime and its Network are ready"
    Core AttachAnswers attach_answers "Attach creates the interface with the requested addresses, and \
        returns what it created"
    Core AttachCarriesPackets attach_carries_packets "when Attach answers, packets flow, both ways and in \
        each family"
    Core AttachAgain attach_again "the same Attach again gives the same answer"
    Core AttachConflict attach_conflict "a different Attach for an existing interface is refused with \
        CONFLICT"
    Core AttachUnknownNetwork attach_unknown_network "Attach to a Network that is not set up is \
        NETWORK_NOT_FOUND"
    Core AttachGoneNamespace attach_gone_namespace "Attach to a missing namespace is NAMESPACE_GONE"
    Core AttachAllOrNothing attach_all_or_nothing "a partly failed Attach leaves nothing behind"
    Core AttachAtOnce attach_at_once "pods are attached and detached at the same time"
    Core ErrorsAreTyped errors_are_typed "every error carries an ErrorDetail, and the status code that goes \
                                          with it"
    Core AttachNeedsAddresses attach_needs_addresses "Attach without addresses is INVALID: they are the \
        agent's to choose"
    Core DefaultRoute default_route "the pod's default route goes out where it was requested, in each \
        family, and nowhere else"
    Core NameServers name_servers "name servers of the request are in the answer, and in List"
    Core HostEnd host_end "the other end that the answer names exists"
    Core DetachRemoves detach_removes "Detach removes the interface"
    Core DetachOneOfTwo detach_one_of_two "Detach of one interface leaves the other"
    Core DetachAgain detach_again "Detach of an interface that is gone, or never existed, succeeds"
    Core DetachGoneNamespace detach_gone_namespace "Detach succeeds when the pod's namespace is gone"
    Core ListTells list_tells "List has every attachment, and on request those of one sandbox"
    Core ListKnowsPods list_knows_pods "List names the pod of an attachment: namespace, name and uid, as in \
        the request"
    Core CheckPasses check_passes "Check of an unchanged attachment succeeds"
    Core CheckSeesDamage check_sees_damage "Check returns DAMAGED for an interface that lost an address, and \
        fails for one that is gone"
    Core CheckSeesLinkDown check_sees_link_down "Check returns DAMAGED for an interface that is down"
    Core CheckSeesOtherNamespace check_sees_other_namespace "Check fails when the pod's path leads to \
        another namespace"
    Core CheckUnknown check_unknown "Check of an unknown attachment is ATTACHMENT_NOT_FOUND"
    CollectGarbage CollectGarbage collect_garbage "CollectGarbage removes and returns what is not in its \
        list, and nothing else"
}

async fn capabilities(bed: &Bed) -> Verdict {
    let request = wire::GetCapabilitiesRequest { client_version: PROTOCOL_VERSION.into() };
    let answer = bed.client.clone().get_capabilities(request).await;
    let answer = answer.map_err(|status| Problem::from(error_from_status(&status)))?.into_inner();
    let name = &answer.name;
    ensure!(
        name.split_once('/').is_some_and(|(domain, rest)| domain.contains('.') && !rest.is_empty()),
        "its name is {name:?}: it needs a domain in front, as in example.com/bridge"
    );
    ensure!(!answer.version.is_empty(), "it has no version");
    ensure!(
        answer.protocol_version == PROTOCOL_VERSION,
        "it speaks {:?} with a client of {PROTOCOL_VERSION}",
        answer.protocol_version
    );
    for announced in &answer.features {
        ensure!(
            feature::all().any(|known| known == announced) || announced.contains('/'),
            "feature {announced:?} is not known: additional features need a domain in front"
        );
    }
    let any = |features: &[&str]| features.iter().any(|f| answer.features.iter().any(|a| a == f));
    ensure!(any(&[feature::IPV4, feature::IPV6]), "it announces neither IPv4 nor IPv6");
    let topologies: Vec<&str> = feature::topologies().collect();
    ensure!(any(&topologies), "it announces none of {}", topologies.join(", "));
    Ok(())
}

async fn status_ready(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let before = bed.runtime.status().await?;
    ensure!(before.ready, "it is not ready: {}", before.message);
    let count = |status: &knit_runtime::Status| {
        status.networks.iter().find(|n| n.name == network.name).map(|n| (n.ready, n.attachments))
    };
    let Some((ready, attachments)) = count(&before) else {
        return Err(Problem::Failed(format!("Network {} is not in its status", network.name)));
    };
    ensure!(ready, "Network {} is not ready", network.name);
    bed.attached(&network).await?;
    let after = count(&bed.runtime.status().await?);
    ensure!(after == Some((true, attachments + 1)), "with one more pod, the status is {after:?}");
    Ok(())
}

async fn attach_answers(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let pod = bed.pod()?;
    let request = bed.request(&pod, &network);
    let made = bed.runtime.attach(&request).await?;
    ensure!(made.pod.sandbox == pod.pod.sandbox, "the answer is for sandbox {}", made.pod.sandbox);
    ensure!(made.network == network.name, "the answer is for Network {}", made.network);
    ensure!(made.interface == request.interface, "the answer is for interface {}", made.interface);
    let (wanted, got) = (ips(&request.addresses), ips(&made.addresses));
    ensure!(got == wanted, "it has addresses {got:?}, but {wanted:?} were requested");
    ensure!(made.mac.0 != [0; 6], "it has no MAC");
    ensure!(made.mtu >= 576, "its MTU is {}", made.mtu);
    let inode = pod.space.id().ino;
    ensure!(
        made.pod_netns_inode == inode,
        "the answer has namespace {}, but it is {inode}",
        made.pod_netns_inode
    );
    pod.has(&made)
}

async fn attach_carries_packets(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (one, first) = bed.attached(&network).await?;
    let (two, second) = bed.attached(&network).await?;
    for family in Family::ALL {
        carries(&one, &first, &two, &second, family).await?;
    }
    Ok(())
}

/// Packets flow between two pods in a family, if they have it.
pub(crate) async fn carries(
    one: &TestPod,
    first: &Attachment,
    two: &TestPod,
    second: &Attachment,
    family: Family,
) -> Verdict {
    let (Some(from), Some(to)) = (address_of(first, family), address_of(second, family)) else {
        return Ok(());
    };
    for (a, b, from, to) in [(one, two, from, to), (two, one, to, from)] {
        let source = talk(&a.space, SocketAddr::new(to, 5555), &b.space, 5555).await?;
        ensure!(source == from, "packets from {from} to {to} arrive from {source}");
    }
    Ok(())
}

async fn attach_again(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let pod = bed.pod()?;
    let request = bed.request(&pod, &network);
    let first = bed.runtime.attach(&request).await?;
    let index = pod.link(&first.interface)?.map(|l| l.index);
    let second = bed.runtime.attach(&request).await?;
    ensure!(second == first, "first {first:?}, then {second:?}");
    let again = pod.link(&first.interface)?.map(|l| l.index);
    ensure!(again == index, "the interface was recreated: index {index:?} became {again:?}");
    let listed = bed.runtime.list(Some(&pod.pod.sandbox)).await?.len();
    ensure!(listed == 1, "List has {listed} attachments of the pod");
    Ok(())
}

async fn attach_conflict(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (pod, made) = bed.attached(&network).await?;
    let mut request = bed.request(&pod, &network);
    request.addresses = bed.other_addresses(&network);
    refused(bed.runtime.attach(&request).await, Reason::Conflict)?;
    pod.has(&made)
}

async fn attach_unknown_network(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let pod = bed.pod()?;
    let mut request = bed.request(&pod, &network);
    request.network = NOWHERE.into();
    refused(bed.runtime.attach(&request).await, Reason::NetworkNotFound)?;
    nothing_left(bed, &pod).await
}

async fn attach_gone_namespace(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let pod = bed.pod()?;
    NetNs::delete(&pod.path)?;
    refused(bed.runtime.attach(&bed.request(&pod, &network)).await, Reason::NamespaceGone)?;
    nothing_left(bed, &pod).await
}

async fn attach_all_or_nothing(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let pod = bed.pod()?;
    let request = bed.request(&pod, &network);
    let good = as_message(&request, "eth0", &network.name);
    let bad = as_message(&request, "net1", NOWHERE);
    let message = wire::AttachRequest { pod: Some(pod_message(&pod)), attachments: vec![good, bad] };
    match bed.client.clone().attach(message).await {
        Ok(_) => return Err(Problem::Failed(format!("an Attach to Network {NOWHERE} succeeded"))),
        Err(status) => {
            let reason = error_from_status(&status).reason;
            ensure!(reason == Reason::NetworkNotFound, "it answered {reason:?}, not NetworkNotFound");
        }
    }
    nothing_left(bed, &pod).await?;
    // And nothing is in the way of the next attempt.
    let made = bed.runtime.attach(&request).await?;
    pod.has(&made)
}

async fn attach_at_once(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let pods = (0..AT_ONCE).map(|_| bed.pod()).collect::<Result<Vec<_>, _>>()?;
    let requests: Vec<_> = pods.iter().map(|pod| bed.request(pod, &network)).collect();
    let made = join_all(requests.iter().map(|request| bed.runtime.attach(request))).await;
    let made = made.into_iter().collect::<Result<Vec<_>, _>>()?;
    for (pod, attachment) in pods.iter().zip(&made) {
        pod.has(attachment)?;
    }
    let family = if made[0].addresses.has_family(Family::V4) { Family::V4 } else { Family::V6 };
    carries(&pods[0], &made[0], &pods[AT_ONCE - 1], &made[AT_ONCE - 1], family).await?;
    for result in join_all(pods.iter().map(|pod| bed.runtime.detach(&pod.pod, None))).await {
        result?;
    }
    for pod in &pods {
        nothing_left(bed, pod).await?;
    }
    Ok(())
}

async fn errors_are_typed(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let pod = bed.pod()?;
    let request = bed.request(&pod, &network);
    let attach = |pod: Option<wire::Pod>, attachments| {
        let mut client = bed.client.clone();
        async move { client.attach(wire::AttachRequest { pod, attachments }).await.map(drop) }
    };
    let good = || as_message(&request, "eth0", &network.name);
    let mut long = good();
    long.interface = "a-name-that-is-too-long".into();
    let mut no_address = good();
    no_address.addresses.iter_mut().for_each(|a| a.ip = "nonsense".into());
    let cases = [
        ("no pod", attach(None, vec![good()]).await, wire::Reason::Invalid, tonic::Code::InvalidArgument),
        (
            "no attachments",
            attach(Some(pod_message(&pod)), Vec::new()).await,
            wire::Reason::Invalid,
            tonic::Code::InvalidArgument,
        ),
        (
            "an interface with a name that is too long",
            attach(Some(pod_message(&pod)), vec![long]).await,
            wire::Reason::Invalid,
            tonic::Code::InvalidArgument,
        ),
        (
            "an invalid address",
            attach(Some(pod_message(&pod)), vec![no_address]).await,
            wire::Reason::Invalid,
            tonic::Code::InvalidArgument,
        ),
        (
            "an unknown Network",
            attach(Some(pod_message(&pod)), vec![as_message(&request, "eth0", NOWHERE)]).await,
            wire::Reason::NetworkNotFound,
            tonic::Code::NotFound,
        ),
    ];
    for (what, result, reason, code) in cases {
        let Err(status) = result else {
            return Err(Problem::Failed(format!("Attach with {what} succeeded")));
        };
        let Some(detail) = error_detail(&status) else {
            return Err(Problem::Failed(format!(
                "the error of Attach with {what} has no ErrorDetail in the details of its status"
            )));
        };
        ensure!(detail.reason() == reason, "Attach with {what} is {:?}, not {reason:?}", detail.reason());
        ensure!(status.code() == code, "Attach with {what} has code {:?}, not {code:?}", status.code());
        ensure!(!detail.message.is_empty(), "the error of Attach with {what} has no message");
    }
    nothing_left(bed, &pod).await
}

async fn attach_needs_addresses(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let pod = bed.pod()?;
    let mut request = bed.request(&pod, &network);
    request.addresses.clear();
    refused(bed.runtime.attach(&request).await, Reason::Invalid)?;
    nothing_left(bed, &pod).await
}

async fn default_route(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (with, without) = (bed.pod()?, bed.pod()?);
    let made = bed.runtime.attach(&bed.request(&with, &network)).await?;
    let mut request = bed.request(&without, &network);
    request.default_route = false;
    bed.runtime.attach(&request).await?;
    for (family, everywhere) in [(Family::V4, "0.0.0.0/0"), (Family::V6, "::/0")] {
        if address_of(&made, family).is_none() {
            continue;
        }
        let destination = everywhere.parse().map_err(|e| Problem::Failed(format!("{e}")))?;
        let route = Route { destination, via: None };
        ensure!(with.has_route(&route)?, "the pod has no route to {everywhere}");
        ensure!(!without.has_route(&route)?, "a pod that did not request it has a route to {everywhere}");
    }
    Ok(())
}

async fn name_servers(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let pod = bed.pod()?;
    let mut request = bed.request(&pod, &network);
    request.dns = Dns {
        servers: vec!["198.51.100.53".into(), "2001:db8::53".into()],
        searches: vec!["knit-conformance.svc.example.com".into()],
        options: vec!["ndots:5".into()],
    };
    let made = bed.runtime.attach(&request).await?;
    ensure!(made.dns == request.dns, "{:?} was requested, but the answer has {:?}", request.dns, made.dns);
    let listed = bed.runtime.list(Some(&pod.pod.sandbox)).await?;
    ensure!(listed.iter().all(|a| a.dns == request.dns), "List has {listed:?}");
    Ok(())
}

async fn host_end(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (_pod, made) = bed.attached(&network).await?;
    let host = &made.host;
    if host.name.is_empty() {
        return Err(Problem::Skipped("the runtime does not name the other end".into()));
    }
    let space = match &host.netns_path {
        None => NetNs::current()?,
        Some(path) => match NetNs::open(path) {
            Ok(space) => space,
            // It may be mounted where only the runtime and the agent see it.
            Err(error) => {
                return Err(Problem::Skipped(format!("{} cannot be opened: {error}", path.display())));
            }
        },
    };
    let inode = space.id().ino;
    ensure!(host.netns_inode == inode, "the answer has namespace {}, but it is {inode}", host.netns_inode);
    let link = Handle::open(&space)?.link(host.index)?;
    let name = link.map(|link| link.name.to_string());
    ensure!(
        name.as_deref() == Some(host.name.as_str()),
        "link {} of that namespace is {name:?}, but the answer has {}",
        host.index,
        host.name
    );
    Ok(())
}

async fn detach_removes(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (pod, made) = bed.attached(&network).await?;
    bed.runtime.detach(&pod.pod, Some(&made.interface)).await?;
    nothing_left(bed, &pod).await?;
    // Its addresses are free again.
    let other = bed.pod()?;
    let mut request = bed.request(&other, &network);
    request.addresses = made.addresses;
    let made = bed.runtime.attach(&request).await?;
    other.has(&made)
}

async fn detach_one_of_two(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let pod = bed.pod()?;
    let first = bed.runtime.attach(&bed.request(&pod, &network)).await?;
    let mut request = bed.request(&pod, &network);
    request.interface = InterfaceName::new("net1")?;
    request.addresses = bed.other_addresses(&network);
    request.default_route = false;
    let second = bed.runtime.attach(&request).await?;
    bed.runtime.detach(&pod.pod, Some(&second.interface)).await?;
    ensure!(pod.link(&second.interface)?.is_none(), "{} is still there", second.interface);
    pod.has(&first)?;
    let listed: Vec<_> = bed.runtime.list(Some(&pod.pod.sandbox)).await?;
    ensure!(listed.len() == 1 && listed[0].interface == first.interface, "List has {listed:?}");
    Ok(())
}

async fn detach_again(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (pod, made) = bed.attached(&network).await?;
    bed.runtime.detach(&pod.pod, None).await?;
    bed.runtime.detach(&pod.pod, None).await?;
    bed.runtime.detach(&pod.pod, Some(&made.interface)).await?;
    let stranger = Pod {
        sandbox: SandboxId::new("knit-conformance-never-there")?,
        namespace: None,
        name: None,
        uid: None,
    };
    bed.runtime.detach(&stranger, Some(&eth0())).await?;
    bed.runtime.detach(&stranger, None).await?;
    Ok(())
}

async fn detach_gone_namespace(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (TestPod { pod, path, space, .. }, _) = bed.attached(&network).await?;
    NetNs::delete(&path)?;
    drop(space);
    bed.runtime.detach(&pod, None).await?;
    let listed = bed.runtime.list(Some(&pod.sandbox)).await?;
    ensure!(listed.is_empty(), "List still has {listed:?}");
    Ok(())
}

async fn list_tells(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (one, first) = bed.attached(&network).await?;
    let (_two, second) = bed.attached(&network).await?;
    let all = bed.runtime.list(None).await?;
    for attachment in [&first, &second] {
        let found = all.iter().find(|a| a.pod.sandbox == attachment.pod.sandbox);
        ensure!(found == Some(attachment), "Attach answered {attachment:?}, List has {found:?}");
    }
    let of_one = bed.runtime.list(Some(&one.pod.sandbox)).await?;
    ensure!(of_one == [first], "List of one sandbox has {of_one:?}");
    let of_nobody = bed.runtime.list(Some(&SandboxId::new("knit-conformance-never-there")?)).await?;
    ensure!(of_nobody.is_empty(), "List of an unknown sandbox has {of_nobody:?}");
    Ok(())
}

async fn list_knows_pods(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (pod, made) = bed.attached(&network).await?;
    ensure!(made.pod == pod.pod, "{:?} was attached, but the answer has {:?}", pod.pod, made.pod);
    let listed = bed.runtime.list(Some(&pod.pod.sandbox)).await?;
    ensure!(listed.iter().all(|a| a.pod == pod.pod), "{:?} was attached, but List has {listed:?}", pod.pod);
    Ok(())
}

async fn check_passes(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (pod, made) = bed.attached(&network).await?;
    bed.runtime.check(&pod.pod, None, Some(&made.interface)).await?;
    bed.runtime.check(&pod.pod, None, None).await?;
    pod.has(&made)
}

async fn check_sees_damage(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (pod, made) = bed.attached(&network).await?;
    let Some(link) = pod.link(&made.interface)? else {
        return Err(Problem::Failed("there is no interface to damage".into()));
    };
    let handle = Handle::open(&pod.space)?;
    let lost = made.addresses.first().ok_or_else(|| Problem::Failed("it has no address to lose".into()))?;
    handle.remove(KernelAddress::new(link.index, lost.net))?;
    refused(bed.runtime.check(&pod.pod, None, Some(&made.interface)).await, Reason::Damaged)?;
    handle.delete_link(link.index)?;
    // Who keeps no record of his own cannot tell the second from what was never there.
    match bed.runtime.check(&pod.pod, None, Some(&made.interface)).await {
        Err(error) if matches!(error.reason, Reason::Damaged | Reason::AttachmentNotFound) => {}
        other => refused(other, Reason::Damaged)?,
    }
    // Nor does it stand in the way of its end.
    bed.runtime.detach(&pod.pod, None).await?;
    nothing_left(bed, &pod).await
}

async fn check_sees_link_down(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (pod, made) = bed.attached(&network).await?;
    let name = IfName::new(made.interface.as_str())?;
    Handle::open(&pod.space)?.apply(&[Change::named(name).down().into()])?;
    refused(bed.runtime.check(&pod.pod, Some(&pod.path), Some(&made.interface)).await, Reason::Damaged)
}

async fn check_sees_other_namespace(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (pod, made) = bed.attached(&network).await?;
    NetNs::delete(&pod.path)?;
    NetNs::create(&pod.path)?;
    match bed.runtime.check(&pod.pod, Some(&pod.path), Some(&made.interface)).await {
        Err(error) if matches!(error.reason, Reason::Damaged | Reason::NamespaceGone) => {}
        other => refused(other, Reason::NamespaceGone)?,
    }
    bed.runtime.detach(&pod.pod, None).await?;
    Ok(())
}

async fn check_unknown(bed: &Bed) -> Verdict {
    let pod = bed.pod()?;
    refused(bed.runtime.check(&pod.pod, None, Some(&eth0())).await, Reason::AttachmentNotFound)
}

async fn collect_garbage(bed: &Bed) -> Verdict {
    let network = bed.network().await?;
    let (kept, kept_made) = bed.attached(&network).await?;
    let (gone, gone_made) = bed.attached(&network).await?;
    // What is not the suite's stays.
    let all = bed.runtime.list(None).await?;
    let keep: Vec<SandboxId> =
        all.into_iter().map(|a| a.pod.sandbox).filter(|sandbox| *sandbox != gone.pod.sandbox).collect();
    let removed = bed.runtime.collect_garbage(&keep).await?;
    ensure!(removed == [gone_made], "it returned {removed:?} as removed");
    nothing_left(bed, &gone).await?;
    kept.has(&kept_made)?;
    let again = bed.runtime.collect_garbage(&keep).await?;
    ensure!(again.is_empty(), "with nothing left to remove, it returned {again:?} as removed");
    let listed = bed.runtime.list(Some(&kept.pod.sandbox)).await?;
    ensure!(listed == [kept_made], "List has {listed:?} of the pod that should stay");
    Ok(())
}

/// The call failed for this reason.
pub(crate) fn refused<T>(result: knit_runtime::Result<T>, reason: Reason) -> Verdict {
    match result {
        Ok(_) => Err(Problem::Failed(format!("it succeeded, but must be refused with {reason:?}"))),
        Err(error) if error.reason == reason => Ok(()),
        Err(error) => {
            Err(Problem::Failed(format!("it answered {:?}, not {reason:?}: {}", error.reason, error.message)))
        }
    }
}

/// Neither list nor namespace has anything of a pod.
async fn nothing_left(bed: &Bed, pod: &TestPod) -> Verdict {
    let listed = bed.runtime.list(Some(&pod.pod.sandbox)).await?;
    ensure!(listed.is_empty(), "List still has {listed:?}");
    let links = Handle::open(&pod.space)?.links(&knit_kernel::handle::LinkFilter::default())?;
    let left: Vec<_> = links.iter().map(|l| l.name.as_str()).filter(|name| *name != "lo").collect();
    ensure!(left.is_empty(), "the pod still has {left:?}");
    Ok(())
}

fn ips(addresses: &[knit_runtime::Address]) -> Vec<std::net::IpAddr> {
    let mut ips: Vec<_> = addresses.iter().map(|a| a.net.addr()).collect();
    ips.sort();
    ips
}

fn pod_message(pod: &TestPod) -> wire::Pod {
    wire::Pod {
        sandbox_id: pod.pod.sandbox.to_string(),
        netns_path: pod.path.display().to_string(),
        namespace: pod.pod.namespace.clone().unwrap_or_default(),
        name: pod.pod.name.clone().unwrap_or_default(),
        ..wire::Pod::default()
    }
}

fn as_message(
    request: &knit_runtime::AttachRequest,
    interface: &str,
    network: &str,
) -> wire::AttachmentRequest {
    let address = |a: &knit_runtime::Address| wire::Address {
        family: if a.net.addr().is_ipv4() { wire::Family::Ipv4 } else { wire::Family::Ipv6 }.into(),
        ip: a.net.addr().to_string(),
        prefix: a.net.prefix_len().into(),
        gateway: a.gateway.map(|g| g.to_string()).unwrap_or_default(),
    };
    wire::AttachmentRequest {
        network: network.into(),
        interface: interface.into(),
        addresses: request.addresses.iter().map(address).collect(),
        default_route: request.default_route,
        ..wire::AttachmentRequest::default()
    }
}
