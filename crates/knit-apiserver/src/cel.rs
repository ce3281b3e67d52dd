//! CEL rules of CRDs (`x-kubernetes-validations`): compiled once, run against new and old values, with the
//! functions on addresses that Kubernetes adds to CEL.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use cel::extractors::This;
use cel::objects::{Key, Map, Opaque, Value as Cel};
use cel::{Context, Env, ExecutionError, Program, extensions};
use ipnet::IpNet;
use serde_json::Value;

use super::schema::{Schema, Type, field};
use super::status::Cause;

/// One rule of a schema.
#[derive(Debug)]
pub struct Rule {
    text: String,
    program: Program,
    message: Option<String>,
    message_expression: Option<Program>,
    reason: Option<String>,
    field_path: Option<String>,
    uses_old: bool,
    optional_old: bool,
}

/// A rule that is not CEL.
#[derive(Debug, thiserror::Error)]
#[error("{text:?} is not a CEL expression: {why}")]
pub struct RuleError {
    text: String,
    why: String,
}

fn environment() -> Arc<Env> {
    static ENV: OnceLock<Arc<Env>> = OnceLock::new();
    Arc::clone(ENV.get_or_init(|| {
        let mut env = Env::stdlib();
        for extension in [extensions::strings, extensions::lists, extensions::math] {
            // The extensions declare names of their own, so that this can only fail if two of them clash.
            if let Err(error) = env.add_extension(extension) {
                tracing::warn!(%error, "a CEL extension is missing");
            }
        }
        Arc::new(env)
    }))
}

impl Rule {
    /// Compiles an entry of `x-kubernetes-validations`.
    pub fn compile(rule: &Value) -> Result<Self, RuleError> {
        let text = |name: &str| rule[name].as_str().map(str::to_owned);
        let compile = |source: &str| {
            environment()
                .compile(source)
                .map_err(|error| RuleError { text: source.to_owned(), why: error.to_string() })
        };
        let source = text("rule").unwrap_or_default();
        let program = compile(&source)?;
        let message_expression = text("messageExpression").map(|source| compile(&source)).transpose()?;
        let uses_old = program.references().has_variable("oldSelf");
        Ok(Self {
            program,
            message: text("message"),
            message_expression,
            reason: text("reason"),
            field_path: text("fieldPath"),
            uses_old,
            optional_old: rule["optionalOldSelf"] == true,
            text: source,
        })
    }

    fn check(
        &self,
        root: &Context<'_, '_>,
        new: &Cel,
        old: Option<&Cel>,
        path: &str,
        value: &Value,
    ) -> Option<Cause> {
        let mut scope = root.new_inner_scope();
        scope.add_variable_from_value("self", new.clone());
        match (old, self.uses_old) {
            (Some(old), true) => scope.add_variable_from_value("oldSelf", old.clone()),
            // A transition rule has nothing to say about a new value, unless it says that it has.
            (None, true) if !self.optional_old => return None,
            _ => {}
        }
        let problem = match self.program.execute(&scope) {
            Ok(Cel::Bool(true)) => return None,
            Ok(Cel::Bool(false)) => match &self.message_expression {
                Some(expression) => match expression.execute(&scope) {
                    Ok(Cel::String(text)) if !text.trim().is_empty() => text.trim().to_owned(),
                    _ => self.fallback_message(),
                },
                None => self.fallback_message(),
            },
            Ok(other) => format!("rule evaluation error: {:?} gave {other:?}, not a bool", self.text),
            Err(error) => format!("rule evaluation error: {error} (rule: {})", self.text),
        };
        let path = match &self.field_path {
            Some(below) => {
                format!("{path}{}", if path.is_empty() { below.trim_start_matches('.') } else { below })
            }
            None => path.to_owned(),
        };
        Some(match self.reason.as_deref() {
            Some("FieldValueForbidden") => Cause::forbidden(path, &problem),
            Some("FieldValueRequired") => Cause::required(path, &problem),
            Some("FieldValueDuplicate") => Cause::duplicate(path, value),
            _ => Cause::against_rule(path, value, &problem),
        })
    }

    fn fallback_message(&self) -> String {
        self.message.clone().unwrap_or_else(|| format!("failed rule: {}", self.text))
    }
}

/// Runs every rule of a schema on a value, and transition rules on the old one where there is one.
pub fn check(schema: &Schema, value: &Value, old: Option<&Value>) -> Vec<Cause> {
    let mut causes = Vec::new();
    if has_rules(schema) {
        let mut root = Context::with_env(environment());
        add_functions(&mut root);
        walk(schema, value, old, "", &root, &mut causes);
    }
    causes
}

fn has_rules(schema: &Schema) -> bool {
    !schema.rules.is_empty()
        || schema.properties.values().any(has_rules)
        || schema.items.as_deref().is_some_and(has_rules)
        || schema.additional.as_deref().is_some_and(has_rules)
}

fn walk(
    schema: &Schema,
    value: &Value,
    old: Option<&Value>,
    path: &str,
    root: &Context<'_, '_>,
    causes: &mut Vec<Cause>,
) {
    if value.is_null() {
        return;
    }
    if !schema.rules.is_empty() {
        let new = to_cel(schema, value, path.is_empty());
        let before = old.map(|old| to_cel(schema, old, path.is_empty()));
        for rule in &schema.rules {
            causes.extend(rule.check(root, &new, before.as_ref(), path, value));
        }
    }
    match value {
        Value::Object(map) => {
            for (name, child) in map {
                let Some(below) = schema.properties.get(name).or(schema.additional.as_deref()) else {
                    continue;
                };
                if has_rules(below) {
                    let here = if schema.properties.contains_key(name) {
                        field(path, name)
                    } else {
                        format!("{path}[{name}]")
                    };
                    walk(below, child, old.and_then(|old| old.get(name)), &here, root, causes);
                }
            }
        }
        Value::Array(list) => {
            let Some(below) = schema.items.as_deref().filter(|items| has_rules(items)) else { return };
            for (index, child) in list.iter().enumerate() {
                // Only the elements of a keyed list have an old self.
                let same = |other: &&Value| schema.map_keys.iter().all(|key| other[key] == child[key]);
                let before = if schema.map_keys.is_empty() {
                    None
                } else {
                    old.and_then(Value::as_array).and_then(|list| list.iter().find(same))
                };
                walk(below, child, before, &format!("{path}[{index}]"), root, causes);
            }
        }
        _ => {}
    }
}

/// A value as CEL sees it: numbers by the schema's type, dates as timestamps, fields under their CEL names.
fn to_cel(schema: &Schema, value: &Value, top: bool) -> Cel {
    match value {
        Value::Null => Cel::Null,
        Value::Bool(flag) => Cel::Bool(*flag),
        Value::Number(number) => match number.as_i64() {
            Some(whole) if schema.kind != Type::Number => Cel::Int(whole),
            _ => Cel::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => match schema.format.as_deref() {
            Some("date-time") => timestamp(text).unwrap_or_else(|| Cel::String(Arc::new(text.clone()))),
            _ => Cel::String(Arc::new(text.clone())),
        },
        Value::Array(list) => {
            let items = |item: &Value| match schema.items.as_deref() {
                Some(below) => to_cel(below, item, false),
                None => untyped(item),
            };
            Cel::List(Arc::new(list.iter().map(items).collect()))
        }
        Value::Object(map) => {
            let mut out = HashMap::new();
            for (name, child) in map {
                if top && name == "metadata" {
                    let mut metadata = HashMap::new();
                    for field in ["name", "generateName"] {
                        if let Some(text) = child[field].as_str() {
                            metadata.insert(Key::from(field), Cel::String(Arc::new(text.to_owned())));
                        }
                    }
                    out.insert(Key::from("metadata"), Cel::Map(Map { map: Arc::new(metadata) }));
                    continue;
                }
                if let Some(below) = schema.properties.get(name) {
                    out.insert(Key::from(escaped(name)), to_cel(below, child, false));
                } else if let Some(below) = &schema.additional {
                    out.insert(Key::from(name.clone()), to_cel(below, child, false));
                } else if top && (name == "kind" || name == "apiVersion") {
                    out.insert(Key::from(name.clone()), untyped(child));
                }
                // Fields that the schema does not describe cannot be seen by rules, as in a real server.
            }
            Cel::Map(Map { map: Arc::new(out) })
        }
    }
}

fn untyped(value: &Value) -> Cel {
    match value {
        Value::Array(list) => Cel::List(Arc::new(list.iter().map(untyped).collect())),
        Value::Object(map) => {
            let map = map.iter().map(|(name, child)| (Key::from(name.clone()), untyped(child))).collect();
            Cel::Map(Map { map: Arc::new(map) })
        }
        Value::Null => Cel::Null,
        Value::Bool(flag) => Cel::Bool(*flag),
        Value::Number(number) => {
            number.as_i64().map_or_else(|| Cel::Float(number.as_f64().unwrap_or(f64::NAN)), Cel::Int)
        }
        Value::String(text) => Cel::String(Arc::new(text.clone())),
    }
}

fn timestamp(text: &str) -> Option<Cel> {
    // Timestamps are made by CEL itself, so that its type of them stays its own business.
    static PROGRAM: OnceLock<Option<Program>> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| environment().compile("timestamp(text)").ok()).as_ref()?;
    let mut context = Context::with_env(environment());
    context.add_variable_from_value("text", text.to_owned());
    program.execute(&context).ok()
}

/// The name of a field in CEL: what is reserved or no identifier is escaped as Kubernetes does.
fn escaped(name: &str) -> String {
    const RESERVED: &[&str] = &[
        "true",
        "false",
        "null",
        "in",
        "as",
        "break",
        "const",
        "continue",
        "else",
        "for",
        "function",
        "if",
        "import",
        "let",
        "loop",
        "package",
        "namespace",
        "return",
        "var",
        "void",
        "while",
    ];
    if RESERVED.contains(&name) {
        return format!("__{name}__");
    }
    name.replace("__", "__underscores__")
        .replace('.', "__dot__")
        .replace('-', "__dash__")
        .replace('/', "__slash__")
}

/// An address in CEL.
#[derive(Debug, PartialEq, Eq)]
struct Ip(IpAddr);

/// A prefix in CEL, host bits kept.
#[derive(Debug, PartialEq, Eq)]
struct Cidr(IpNet);

impl Opaque for Ip {
    fn runtime_type_name(&self) -> &str {
        "net.IP"
    }
}

impl Opaque for Cidr {
    fn runtime_type_name(&self) -> &str {
        "net.CIDR"
    }
}

/// Kubernetes takes neither zones nor IPv4-mapped IPv6 addresses.
fn parse_ip(text: &str) -> Option<IpAddr> {
    let ip: IpAddr = text.parse().ok()?;
    match ip {
        IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => None,
        other => Some(other),
    }
}

fn parse_cidr(text: &str) -> Option<IpNet> {
    let net: IpNet = text.parse().ok()?;
    match net.addr() {
        IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => None,
        _ => Some(net),
    }
}

type Answer = Result<Cel, ExecutionError>;

fn fail(function: &str, why: &str) -> ExecutionError {
    ExecutionError::function_error(function, why)
}

fn ip_of(function: &str, value: &Cel) -> Result<IpAddr, ExecutionError> {
    match value {
        Cel::Opaque(opaque) => opaque.downcast_ref::<Ip>().map(|ip| ip.0),
        Cel::String(text) => parse_ip(text),
        _ => None,
    }
    .ok_or_else(|| fail(function, &format!("IP Address {value:?} parse error during conversion from string")))
}

fn cidr_of(function: &str, value: &Cel) -> Result<IpNet, ExecutionError> {
    match value {
        Cel::Opaque(opaque) => opaque.downcast_ref::<Cidr>().map(|cidr| cidr.0),
        Cel::String(text) => parse_cidr(text),
        _ => None,
    }
    .ok_or_else(|| {
        fail(function, &format!("network address {value:?} parse error during conversion from string"))
    })
}

fn opaque_ip(ip: IpAddr) -> Cel {
    Cel::Opaque(Arc::new(Ip(ip)))
}

fn add_functions(context: &mut Context<'_, '_>) {
    // A name that the standard library has already would be refused; none of these is one.
    macro_rules! add {
        ($name:literal, $function:expr) => {
            if let Err(error) = context.add_function($name, $function) {
                tracing::warn!(%error, function = $name, "a CEL function is missing");
            }
        };
    }
    add!("isIP", |This(text): This<Arc<String>>| -> Answer { Ok(Cel::Bool(parse_ip(&text).is_some())) });
    add!("isCIDR", |This(text): This<Arc<String>>| -> Answer { Ok(Cel::Bool(parse_cidr(&text).is_some())) });
    add!("ip", |This(value): This<Cel>| -> Answer {
        if let Cel::Opaque(opaque) = &value
            && let Some(cidr) = opaque.downcast_ref::<Cidr>()
        {
            return Ok(opaque_ip(cidr.0.addr()));
        }
        ip_of("ip", &value).map(opaque_ip)
    });
    add!("cidr", |This(value): This<Cel>| -> Answer {
        cidr_of("cidr", &value).map(|cidr| Cel::Opaque(Arc::new(Cidr(cidr))))
    });
    add!("containsIP", |This(net): This<Cel>, ip: Cel| -> Answer {
        Ok(Cel::Bool(cidr_of("containsIP", &net)?.contains(&ip_of("containsIP", &ip)?)))
    });
    add!("containsCIDR", |This(net): This<Cel>, other: Cel| -> Answer {
        Ok(Cel::Bool(cidr_of("containsCIDR", &net)?.contains(&cidr_of("containsCIDR", &other)?)))
    });
    add!("prefixLength", |This(net): This<Cel>| -> Answer {
        Ok(Cel::Int(i64::from(cidr_of("prefixLength", &net)?.prefix_len())))
    });
    add!("masked", |This(net): This<Cel>| -> Answer {
        Ok(Cel::Opaque(Arc::new(Cidr(cidr_of("masked", &net)?.trunc()))))
    });
    add!("family", |This(ip): This<Cel>| -> Answer {
        Ok(Cel::Int(if ip_of("family", &ip)?.is_ipv4() { 4 } else { 6 }))
    });
    add!("ip.isCanonical", |text: Arc<String>| -> Answer {
        let ip = parse_ip(&text).ok_or_else(|| fail("ip.isCanonical", "not an IP address"))?;
        Ok(Cel::Bool(ip.to_string() == *text))
    });
    add!("isUnspecified", |This(ip): This<Cel>| -> Answer {
        Ok(Cel::Bool(ip_of("isUnspecified", &ip)?.is_unspecified()))
    });
    add!("isLoopback", |This(ip): This<Cel>| -> Answer {
        Ok(Cel::Bool(ip_of("isLoopback", &ip)?.is_loopback()))
    });
    add!("isLinkLocalUnicast", |This(ip): This<Cel>| -> Answer {
        Ok(Cel::Bool(match ip_of("isLinkLocalUnicast", &ip)? {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        }))
    });
    add!("isLinkLocalMulticast", |This(ip): This<Cel>| -> Answer {
        Ok(Cel::Bool(match ip_of("isLinkLocalMulticast", &ip)? {
            IpAddr::V4(v4) => v4.octets()[..3] == [224, 0, 0],
            IpAddr::V6(v6) => v6.segments()[0] & 0xff0f == 0xff02,
        }))
    });
    add!("isGlobalUnicast", |This(ip): This<Cel>| -> Answer {
        Ok(Cel::Bool(match ip_of("isGlobalUnicast", &ip)? {
            IpAddr::V4(v4) => {
                !(v4.is_unspecified()
                    || v4.is_loopback()
                    || v4.is_multicast()
                    || v4.is_link_local()
                    || v4.is_broadcast())
            }
            IpAddr::V6(v6) => {
                !(v6.is_unspecified() || v6.is_loopback() || v6.is_multicast() || v6.is_unicast_link_local())
            }
        }))
    });
    add!("find", |This(text): This<Arc<String>>, pattern: Arc<String>| -> Answer {
        let regex = regex::Regex::new(&pattern).map_err(|error| fail("find", &error.to_string()))?;
        let found = regex.find(&text).map_or("", |found| found.as_str());
        Ok(Cel::String(Arc::new(found.to_owned())))
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn holds(rule: &str, schema: &Value, value: &Value, old: Option<&Value>) -> Vec<String> {
        let mut schema = schema.clone();
        schema["x-kubernetes-validations"] = json!([{"rule": rule, "message": "no"}]);
        let schema = Schema::parse(&schema).unwrap();
        check(&schema, value, old).into_iter().map(|cause| cause.message).collect()
    }

    #[test]
    fn address_functions() {
        let schema = json!({"type": "object", "properties": {"x": {"type": "string"}}});
        let value = json!({"x": "10.1.2.3/16"});
        for rule in [
            "isCIDR(self.x)",
            "!isIP(self.x)",
            "cidr(self.x).containsIP('10.1.255.1')",
            "cidr(self.x).containsIP(ip('10.1.0.1'))",
            "!cidr(self.x).containsIP('10.2.0.1')",
            "cidr('10.0.0.0/8').containsCIDR(self.x)",
            "cidr('10.0.0.0/8').containsCIDR(cidr(self.x))",
            "cidr(self.x).prefixLength() == 16",
            "cidr(self.x).masked() == cidr('10.1.0.0/16')",
            "cidr(self.x) != cidr(self.x).masked()",
            "cidr(self.x).ip() == ip('10.1.2.3')",
            "cidr(self.x).ip().family() == 4",
            "ip('fd00::1').family() == 6",
            "ip.isCanonical('fd00::1') && !ip.isCanonical('FD00::1')",
            "ip('127.0.0.1').isLoopback()",
            "!ip('10.0.0.1').isLinkLocalUnicast() && ip('10.0.0.1').isGlobalUnicast()",
            "self.x.find('[0-9]+') == '10'",
            "'%s has %d'.format([self.x, 2]) == '10.1.2.3/16 has 2'",
            "self.x.split('/')[1] == '16'",
            "self.x.lowerAscii() == self.x && self.x.size() > 3",
            "has(self.x) && !has(self.y)",
        ] {
            assert_eq!(holds(rule, &schema, &value, None), Vec::<String>::new(), "{rule}");
        }
        assert_eq!(holds("isIP(self.x)", &schema, &value, None), ["Invalid value: no"]);
    }

    #[test]
    fn transition_rules_need_an_old_value() {
        let schema = json!({"type": "object", "properties": {"x": {"type": "integer"}}});
        let rule = "self.x == oldSelf.x";
        assert!(holds(rule, &schema, &json!({"x": 1}), None).is_empty());
        assert!(holds(rule, &schema, &json!({"x": 1}), Some(&json!({"x": 1}))).is_empty());
        assert_eq!(holds(rule, &schema, &json!({"x": 2}), Some(&json!({"x": 1}))).len(), 1);
    }

    #[test]
    fn message_expression_field_path_and_reserved_names() {
        let schema = Schema::parse(&json!({"type": "object", "properties": {"spec": {"type": "object",
        "properties": {"namespace": {"type": "string"}, "n": {"type": "integer"},
            "list": {"type": "array", "items": {"type": "string"}}},
        "x-kubernetes-validations": [
            {"rule": "self.__namespace__ != 'x'", "messageExpression": "'not ' + self.__namespace__ + ' \
                with ' + string(self.n)", "fieldPath": ".namespace"},
            {"rule": "self.list.all(a, self.list.exists_one(b, a == b))", "message": "twice",
                "reason": "FieldValueForbidden"}
        ]}}}))
        .unwrap();
        let causes = check(&schema, &json!({"spec": {"namespace": "x", "n": 3, "list": ["a", "a"]}}), None);
        assert_eq!(causes[0].field, "spec.namespace");
        assert_eq!(causes[0].message, "Invalid value: not x with 3");
        assert_eq!(
            (causes[1].reason, causes[1].message.as_str()),
            ("FieldValueForbidden", "Forbidden: twice")
        );
    }

    #[test]
    fn a_rule_that_does_not_parse_is_refused() {
        assert!(Rule::compile(&json!({"rule": "self.x >"})).is_err());
    }
}
