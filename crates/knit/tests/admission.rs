//! What admission policies of deploy/ say of names, evaluated.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use cel::objects::Value as Cel;
use cel::{Context, Env, extensions};
use serde_json::Value;

/// What an expression of a policy of agents is for these variables: the one of this name, or the first
/// validation where it has none of that name.
fn evaluate(policy: &str, variable: &str, known: &[(&str, &str)]) -> bool {
    let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/base/agent/policy.yaml");
    let text = std::fs::read_to_string(place).expect("a file");
    let policies = text.split("\n---\n").map(|text| serde_saphyr::from_str::<Value>(text).expect("YAML"));
    let mut named = policies.filter(|object| object["kind"] == "ValidatingAdmissionPolicy");
    let spec = named.find(|object| object["metadata"]["name"] == policy).expect("a policy")["spec"].take();
    let variables = spec["variables"].as_array().expect("variables");
    let found = variables.iter().find(|found| found["name"] == variable);
    let expression = found.unwrap_or(&spec["validations"][0])["expression"].as_str().expect("an expression");
    let mut env = Env::stdlib();
    // As Kubernetes has it.
    env.add_extension(extensions::strings).expect("an extension");
    let env = Arc::new(env);
    let mut context = Context::with_env(Arc::clone(&env));
    let value = |value: &str| match value {
        "true" => Cel::Bool(true),
        text => Cel::String(Arc::new(text.to_owned())),
    };
    let known: HashMap<String, Cel> =
        known.iter().map(|(name, text)| ((*name).to_owned(), value(text))).collect();
    context.add_variable_from_value("variables", known);
    let program = env.compile(expression).expect("an expression");
    program.execute(&context).expect("evaluated") == Cel::Bool(true)
}

#[test]
fn the_token_of_a_node_with_a_long_name_acted_for_those_whose_names_it_begins_with() {
    let long = format!("{}.{}", "n".repeat(60), "m".repeat(90));
    // A label is cut after 63 characters, and then has no dot or dash at its end.
    let odd = format!("{}.-{}", "n".repeat(61), "m".repeat(30));
    let policy = "knit-node-attaches-its-own-pods";
    for (node, label, own) in [
        (&long, &long[..63], true),
        (&long, &long[..62], false),
        (&long, "n", false),
        (&long, &"n".repeat(60), false),
        (&odd, &odd[..61], true),
        (&odd, &odd[..60], false),
        (&"node-1".to_owned(), "node-1", true),
        (&"node-11".to_owned(), "node-1", false),
    ] {
        for (variable, managed, of) in
            [("oldOwn", "oldManaged", "oldLabel"), ("newOwn", "newManaged", "newLabel")]
        {
            let known = [("node", node.as_str()), (managed, "true"), (of, label)];
            assert_eq!(evaluate(policy, variable, &known), own, "{variable}: {node} and {label}");
        }
    }
    for (node, instance, own) in [
        (&long, &long[..128], true),
        (&long, &long[..60], false),
        (&long, long.as_str(), false),
        (&"node-1".to_owned(), "node-1", true),
    ] {
        let known = [("node", node.as_str()), ("instance", instance), ("before", instance)];
        let found = evaluate("knit-node-tells-in-its-own-name", "the first validation", &known);
        assert_eq!(found, own, "{node} and {instance}");
    }
}
