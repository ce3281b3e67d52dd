//! An API that is there already: one with Nodes is left alone, and in another nothing is left behind.

use k8s_openapi::api::core::v1::{Node, Pod};
use knit_apiserver::{Config, Handle, Server, StoreOptions};
use knit_objects::{Objects, Selection, Source, Write};
use knit_scale::cluster::Api;
use knit_scale::node;
use knit_scale::run::{Error, Options, run};
use knit_scale::scenario::Scenario;

fn scenario() -> Scenario {
    Scenario {
        nodes: vec![4],
        whole: 2,
        pods: 4,
        networks: 1,
        services: 1,
        policies: 1,
        pods_per_second: 0,
        quiet_seconds: 1,
        ..Scenario::default()
    }
}

async fn api() -> (Handle, Objects, Options) {
    let store = StoreOptions::with_crds(&knit_api::crds()).expect("the CRDs");
    let server = Server::start(Config { store, ..Config::default() }).await.expect("an API");
    let source = Source::Url(server.url());
    let objects = Objects::open(source.clone()).await.expect("it answers");
    (server, objects, Options { api: Api::Given(source), controller: None, agent: None })
}

#[tokio::test]
async fn a_cluster_with_nodes_is_left_alone() {
    let (_server, objects, options) = api().await;
    objects.write(&Write::create(&node::node_object(7))).await.expect("a Node");
    let error = run(&scenario(), &options, &|_| {}).await.map(drop).expect_err("it is refused");
    assert!(matches!(&error, Error::InUse { nodes: 1, .. }), "{error}");
    assert!(error.to_string().contains("has 1 Nodes"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_made_in_an_api_that_stays_is_removed() {
    let (_server, objects, options) = api().await;
    let report = run(&scenario(), &options, &|text| println!("{text}")).await.expect("a report");
    assert_eq!(report.sizes[0].errors, Vec::<String>::new());
    assert_eq!(objects.list::<Node>(&Selection::default()).await.expect("a list").len(), 0);
    assert_eq!(objects.list::<Pod>(&Selection::default()).await.expect("a list").len(), 0);
}
