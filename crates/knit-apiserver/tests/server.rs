//! The server on its sockets: the Unix socket, bad requests, and a watch that is too late.

use knit_apiserver::http::{Served, handle};
use knit_apiserver::{Config, Server, StoreOptions};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

/// One request over the Unix socket: the status, the headers and the body as text.
async fn request(socket: &std::path::Path, head: &str, body: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    let length = body.len();
    let text = format!("{head}\r\nhost: lab\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}");
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let code = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (code, answer)
}

#[tokio::test]
async fn answers_on_a_unix_socket_and_refuses_nonsense() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("api.sock");
    let store = StoreOptions { log_size: 16, ..StoreOptions::default() };
    let config = Config { unix_socket: Some(socket.clone()), store, ..Config::default() };
    let server = Server::start(config).await.unwrap();
    assert_eq!(request(&socket, "GET /readyz HTTP/1.1", "").await.0, 200);
    let post = "POST /api/v1/namespaces/default/configmaps HTTP/1.1";
    let good = json!({"metadata": {"name": "a"}, "data": {"k": "v"}}).to_string();
    assert_eq!(request(&socket, post, &good).await.0, 201);
    assert_eq!(request(&socket, post, "metadata: {name: yaml}").await.0, 201);
    for (head, body, code) in [
        (post, "{", 400),
        (post, "[]", 400),
        (post, r#"{"kind": "Pod"}"#, 400),
        (post, r#"{"data": {"a": {}}, "metadata": {"name": "x"}}"#, 400),
        (
            "POST /api/v1/namespaces/default/configmaps HTTP/1.1\r\ncontent-type: \
             application/vnd.kubernetes.protobuf",
            "k8s\0\u{1}",
            400,
        ),
        ("GET /api/v1/unknown HTTP/1.1", "", 404),
        ("GET /apis/none/v1 HTTP/1.1", "", 404),
        ("PUT /api/v1/namespaces HTTP/1.1", "", 405),
        ("PATCH /api/v1/namespaces/default HTTP/1.1", "{}", 415),
        ("GET /api/v1/pods?limit=x HTTP/1.1", "", 400),
        ("GET /api/v1/pods?labelSelector=a%20b HTTP/1.1", "", 400),
        ("GET /api/v1/pods?watch=1&resourceVersion=x HTTP/1.1", "", 400),
        ("GET /api/v1/pods HTTP/1.1\r\naccept: application/vnd.kubernetes.protobuf", "", 406),
        // What kubectl attach and kubectl port-forward ask for.
        ("POST /api/v1/namespaces/default/pods/p/attach?stdin=true HTTP/1.1", "", 501),
        ("POST /api/v1/namespaces/default/pods/p/portforward HTTP/1.1", "", 501),
    ] {
        let (found, answer) = request(&socket, head, body).await;
        assert_eq!(found, code, "{head} {body}: {answer}");
        assert!(answer.contains("\"kind\":\"Status\""), "{answer}");
    }
    let huge = format!(r#"{{"data": {{"a": "{}"}}}}"#, "x".repeat(4 << 20));
    let body = http_body_util::Full::new(bytes::Bytes::from(huge));
    let too_large =
        hyper::Request::post("/api/v1/namespaces/default/configmaps").body(body).expect("a valid request");
    let served = Served { store: server.store().clone(), logs: None, exec: None };
    let answer = handle(served, too_large).await;
    assert_eq!(answer.status().as_u16(), 413);

    for index in 0..30 {
        let object: Value = json!({"apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": format!("c{index}"), "namespace": "default"}});
        server.store().create_object(object).unwrap();
    }
    let (code, answer) =
        request(&socket, "GET /api/v1/configmaps?watch=1&resourceVersion=10 HTTP/1.1", "").await;
    assert_eq!(code, 200);
    assert!(answer.contains("\"type\":\"ERROR\"") && answer.contains("\"code\":410"), "{answer}");
    let table = "GET /api/v1/namespaces/default/configmaps/a HTTP/1.1\r\naccept: \
                 application/json;as=Table;v=v1;g=meta.k8s.io";
    assert!(request(&socket, table, "").await.1.contains("\"cells\":[\"a\",1,"));
    server.shutdown().await;
    assert!(UnixStream::connect(&socket).await.is_err(), "nobody listens any more");
}
