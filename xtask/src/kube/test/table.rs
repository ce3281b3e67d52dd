//! Which end-to-end tests there are, and what each runs on.

use anyhow::Result;

use super::{
    addresses, bad_input, bed, claims, crds, dual_stack, faults, hold, install, kinds, plain_cni, policies,
    primary, proofs, secondary, stolen_token,
};
use crate::kube::bed::Bed;
use crate::kube::components::Group;
use crate::kube::{Cni, Options};

/// One end-to-end test.
pub struct Test {
    /// `topic_what_holds`, in words.
    pub name: &'static str,
    /// What it runs on.
    pub bed: Options,
    /// Whether nothing else may run on that bed before or after it.
    pub own_bed: bool,
    /// What must be built for it. Tests that are not named on the command line are skipped where it is not.
    pub needs: &'static [Group],
    pub run: fn(&Bed) -> Result<()>,
}

/// What CI runs.
pub const TESTS: &[Test] = &[
    Test {
        name: "crds_are_accepted_and_their_rules_hold",
        bed: Options { nodes: 1, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: crds::accepted_and_enforced,
    },
    Test {
        name: "client_suite_holds_on_a_real_api_server",
        bed: Options { nodes: 1, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: proofs::client_suite,
    },
    Test {
        name: "nodes_survive_restarts_of_kubelet_containerd_and_api_server",
        bed: Options { nodes: 1, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: bed::daemons_restart,
    },
    Test {
        name: "bridge_plugin_and_kube_proxy_connect_pods",
        bed: Options { cni: Some(Cni::Bridge), kube_proxy: true, dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core, Group::Peers],
        run: bed::pods_talk,
    },
    Test {
        name: "overlays_secondary_and_dra_attach_through_nri",
        bed: Options { cni: Some(Cni::Bridge), kube_proxy: true, dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core, Group::Peers],
        run: secondary::smoke,
    },
    Test {
        name: "overlay_full_gives_pods_services_dns_ports_and_probes",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: install::full,
    },
    Test {
        name: "overlay_full_agents_are_replaced_without_loss",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: install::agents_replaced,
    },
    Test {
        name: "agents_killed_while_fifty_pods_start",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: faults::agent_killed,
    },
    Test {
        name: "a_hundred_pods_come_and_go_on_one_node",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: faults::hundred_pods,
    },
    Test {
        name: "containerd_and_kubelet_restart_under_traffic",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: faults::node_daemons_restart,
    },
    Test {
        name: "api_server_away_for_a_minute",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: faults::api_away,
    },
    Test {
        name: "every_kind_of_pod_gets_the_right_network",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: kinds::every_kind,
    },
    Test {
        name: "bad_input_is_told_and_hurts_nobody_else",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: bad_input::told,
    },
    Test {
        name: "a_stolen_token_is_one_nodes",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: stolen_token::one_nodes,
    },
    Test {
        name: "claims_are_scheduled_prepared_and_attached",
        bed: Options { nodes: 1, ..Options::BARE },
        own_bed: true,
        needs: &[Group::Core],
        run: claims::served,
    },
    Test {
        name: "attachments_are_published_plugged_in_and_talk",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: proofs::attachments,
    },
    Test {
        name: "external_ips_take_nothing_that_is_not_the_tenants",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: hold::external_ips,
    },
    Test {
        name: "a_pod_cannot_have_the_tunnels_port",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: hold::tunnel_port,
    },
    Test {
        name: "flushed_tables_come_back_and_nothing_crosses",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: hold::flushed,
    },
    Test {
        name: "a_strangers_attachment_pins_no_network",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: hold::pinned,
    },
    Test {
        name: "policies_are_in_force_before_the_first_instruction_and_told",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: policies::smoke,
    },
    Test {
        name: "nodes_are_not_ready_before_the_agent_serves",
        bed: Options { ..Options::BARE },
        own_bed: true,
        needs: &[Group::Core],
        run: proofs::not_ready_before,
    },
    Test {
        name: "addresses_run_out_and_come_back",
        bed: Options { nodes: 1, node_mask: Some(28), ..Options::BARE },
        own_bed: true,
        needs: &[Group::Core],
        run: addresses::run_out,
    },
    Test {
        name: "a_plain_cni_before_knit_and_again_after",
        bed: Options { cni: Some(Cni::Bridge), ..Options::BARE },
        own_bed: true,
        needs: &[Group::Core, Group::Peers],
        run: plain_cni::before_and_after,
    },
    Test {
        name: "overlay_full_is_removed_and_nodes_are_clean",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: true,
        needs: &[Group::Core],
        run: install::removed,
    },
    Test {
        name: "overlay_full_with_both_address_families",
        bed: Options { dual_stack: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core],
        run: dual_stack::both_families,
    },
    Test {
        name: "overlay_cni_beside_kube_proxy",
        bed: Options { kube_proxy: true, dns: true, ..Options::BARE },
        own_bed: false,
        needs: &[Group::Core, Group::Peers],
        run: install::cni,
    },
    Test {
        name: "overlay_proxy_beside_the_bridge_plugin",
        bed: Options { cni: Some(Cni::Bridge), dns: true, ..Options::BARE },
        own_bed: true,
        needs: &[Group::Core, Group::Peers],
        run: install::proxy,
    },
    Test {
        name: "primary_networks_keep_kubernetes_whole",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: true,
        needs: &[Group::Core],
        run: primary::two_tenants,
    },
    Test {
        name: "agents_learn_of_each_other_from_slices",
        bed: Options { dns: true, ..Options::BARE },
        own_bed: true,
        needs: &[Group::Core],
        run: primary::with_slices,
    },
];

/// Those that take long: they run only when they are named, and for a release.
pub const LONG: &[Test] = &[Test {
    name: "nri_pods_get_their_networks_whoever_was_away",
    bed: Options { cni: Some(Cni::Bridge), kube_proxy: true, dns: true, ..Options::BARE },
    own_bed: false,
    needs: &[Group::Core, Group::Peers],
    run: secondary::faults,
}];
