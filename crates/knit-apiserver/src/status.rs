//! Errors as the Kubernetes API words them: a `Status` object with a reason, a code and the causes by field.

use serde_json::{Value, json};

use super::kinds::Kind;

/// One field that is wrong, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// The path of the field, such as `spec.subnets[0]`.
    pub field: String,
    /// The machine-readable kind of problem, such as `FieldValueInvalid`.
    pub reason: &'static str,
    /// The problem in words, without the path.
    pub message: String,
}

impl Cause {
    fn new(field: impl Into<String>, reason: &'static str, message: String) -> Self {
        let field = field.into();
        Self { field: if field.is_empty() { "<nil>".to_owned() } else { field }, reason, message }
    }

    /// The field must be there.
    pub fn required(field: impl Into<String>, message: &str) -> Self {
        let message = if message.is_empty() { String::new() } else { format!(": {message}") };
        Self::new(field, "FieldValueRequired", format!("Required value{message}"))
    }

    /// The field has a value that cannot be.
    pub fn invalid(field: impl Into<String>, value: &Value, message: impl AsRef<str>) -> Self {
        Self::new(
            field,
            "FieldValueInvalid",
            format!("Invalid value: {}: {}", shown(value), message.as_ref()),
        )
    }

    /// The field has a value that a rule of its schema does not allow; whole objects and lists are not shown.
    pub fn against_rule(field: impl Into<String>, value: &Value, message: &str) -> Self {
        match value {
            Value::Object(_) | Value::Array(_) => {
                Self::new(field, "FieldValueInvalid", format!("Invalid value: {message}"))
            }
            value => Self::invalid(field, value, message),
        }
    }

    /// The field has a value of the wrong type, which is shown by the name of its type.
    pub fn wrong_type(field: impl Into<String>, value: &Value, message: impl AsRef<str>) -> Self {
        let shown = type_of(value);
        Self::new(field, "FieldValueTypeInvalid", format!("Invalid value: {shown:?}: {}", message.as_ref()))
    }

    /// Whether a value does not even have the shape that rules are written for.
    pub fn is_of_shape(&self) -> bool {
        matches!(
            self.reason,
            "FieldValueNotSupported"
                | "FieldValueRequired"
                | "FieldValueTooLong"
                | "FieldValueTooMany"
                | "FieldValueTypeInvalid"
        )
    }

    /// Rules were not looked at, because the value does not even fit its schema.
    pub fn rules_not_checked() -> Self {
        let why = "some validation rules were not checked because the object was invalid; correct the \
                   existing errors to \
                   complete validation";
        Self::invalid("", &Value::Null, why)
    }

    /// The field has a value that is not one of the supported ones.
    pub fn not_supported(field: impl Into<String>, value: &Value, supported: &[String]) -> Self {
        let supported: Vec<String> = supported.iter().map(|s| format!("{s:?}")).collect();
        let message =
            format!("Unsupported value: {}: supported values: {}", shown(value), supported.join(", "));
        Self::new(field, "FieldValueNotSupported", message)
    }

    /// The field may not be set, or not be changed.
    pub fn forbidden(field: impl Into<String>, message: &str) -> Self {
        Self::new(field, "FieldValueForbidden", format!("Forbidden: {message}"))
    }

    /// The value is there twice.
    pub fn duplicate(field: impl Into<String>, value: &Value) -> Self {
        Self::new(field, "FieldValueDuplicate", format!("Duplicate value: {}", shown(value)))
    }

    /// The string is too long.
    pub fn too_long(field: impl Into<String>, max: u64) -> Self {
        Self::new(field, "FieldValueTooLong", format!("Too long: may not be more than {max} bytes"))
    }

    /// The list or map has too many entries.
    pub fn too_many(field: impl Into<String>, actual: usize, max: u64) -> Self {
        Self::new(field, "FieldValueTooMany", format!("Too many: {actual}: must have at most {max} items"))
    }
}

/// A value as the API shows it in an error.
fn shown(value: &Value) -> String {
    value.to_string()
}

/// The name of a value's type, as schemas have it.
pub fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// The details of a Status object, without what is empty.
pub fn details(name: &str, group: &str, kind: &str) -> Value {
    let fields = [("name", name), ("group", group), ("kind", kind)];
    fields
        .into_iter()
        .filter(|(_, text)| !text.is_empty())
        .map(|(key, text)| (key.to_owned(), json!(text)))
        .collect()
}

fn causes_value(causes: &[Cause]) -> Value {
    causes.iter().map(|c| json!({"reason": c.reason, "message": c.message, "field": c.field})).collect()
}

/// A request that was refused, with everything a `Status` object says about it.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The HTTP status.
    pub code: u16,
    /// The Kubernetes reason, such as `NotFound`.
    pub reason: &'static str,
    /// What happened, to which object.
    pub message: String,
    /// The `details` of the Status object.
    pub details: Option<Box<Value>>,
}

/// The result of a request.
pub type Result<T, E = ApiError> = std::result::Result<T, E>;

impl ApiError {
    /// An error without details.
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: None }
    }

    fn about(mut self, kind: &Kind, name: &str, use_kind: bool) -> Self {
        let what = if use_kind { &kind.kind } else { &kind.plural };
        self.details = Some(Box::new(details(name, &kind.group, what)));
        self
    }

    /// 400.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// 404 for a path that nothing is served at.
    pub fn no_such_path() -> Self {
        Self::new(404, "NotFound", "the server could not find the requested resource")
    }

    /// 404 for an object.
    pub fn not_found(kind: &Kind, name: &str) -> Self {
        Self::new(404, "NotFound", format!("{} {name:?} not found", kind.resource())).about(kind, name, false)
    }

    /// 409: the name is taken.
    pub fn already_exists(kind: &Kind, name: &str) -> Self {
        Self::new(409, "AlreadyExists", format!("{} {name:?} already exists", kind.resource()))
            .about(kind, name, false)
    }

    /// 409: the object has changed since it was read, or may not be changed like this now.
    pub fn conflict(kind: &Kind, name: &str, why: &str) -> Self {
        Self::new(
            409,
            "Conflict",
            format!("Operation cannot be fulfilled on {} {name:?}: {why}", kind.resource()),
        )
        .about(kind, name, false)
    }

    /// 403.
    pub fn forbidden(kind: &Kind, name: &str, why: &str) -> Self {
        Self::new(403, "Forbidden", format!("{} {name:?} is forbidden: {why}", kind.resource()))
            .about(kind, name, false)
    }

    /// 422: fields are wrong.
    pub fn invalid(kind: &Kind, name: &str, causes: &[Cause]) -> Self {
        let mut words: Vec<String> =
            causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect();
        let words = if words.len() == 1 { words.remove(0) } else { format!("[{}]", words.join(", ")) };
        let of =
            if kind.group.is_empty() { kind.kind.clone() } else { format!("{}.{}", kind.kind, kind.group) };
        let mut error = Self::new(422, "Invalid", format!("{of} {name:?} is invalid: {words}"));
        let mut details = details(name, &kind.group, &kind.kind);
        details["causes"] = causes_value(causes);
        error.details = Some(Box::new(details));
        error
    }

    /// 422: an option of the request, such as `PatchOptions`, is wrong.
    pub fn invalid_options(options: &str, cause: &Cause) -> Self {
        let message = format!("{options}.meta.k8s.io \"\" is invalid: {}: {}", cause.field, cause.message);
        let mut error = Self::new(422, "Invalid", message);
        let mut details = details("", "meta.k8s.io", options);
        details["causes"] = causes_value(std::slice::from_ref(cause));
        error.details = Some(Box::new(details));
        error
    }

    /// 422: what a patch makes of an object cannot be decoded.
    pub fn invalid_patch(patched: &Value, why: &str) -> Self {
        let cause = Cause::invalid("patch", &Value::String(patched.to_string()), why);
        let mut error = Self::new(422, "Invalid", format!(" \"\" is invalid: patch: {}", cause.message));
        error.details = Some(Box::new(json!({"causes": causes_value(&[cause])})));
        error
    }

    /// 409 of server-side apply: others own fields that this apply would change. Each is (manager, field).
    pub fn apply_conflict(conflicts: &[(String, String)]) -> Self {
        let causes: Vec<Value> = conflicts
            .iter()
            .map(|(manager, field)| {
                json!({"reason": "FieldManagerConflict", "message": format!("conflict with {manager}"),
                    "field": field})
            })
            .collect();
        let list: Vec<String> =
            conflicts.iter().map(|(manager, field)| format!("conflict with {manager}: {field}")).collect();
        let noun = if conflicts.len() == 1 { "conflict" } else { "conflicts" };
        let message = format!("Apply failed with {} {noun}: {}", conflicts.len(), list.join("; "));
        let mut error = Self::new(409, "Conflict", message);
        error.details = Some(Box::new(json!({"causes": causes})));
        error
    }

    /// 410: the resourceVersion is older than what is kept.
    pub fn expired(message: impl Into<String>) -> Self {
        Self::new(410, "Expired", message)
    }

    /// 405.
    pub fn method_not_allowed() -> Self {
        Self::new(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
    }

    /// 415.
    pub fn unsupported_media_type(message: impl Into<String>) -> Self {
        Self::new(415, "UnsupportedMediaType", message)
    }

    /// The Status object.
    pub fn to_status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "code": self.code,
        });
        if !self.reason.is_empty() {
            status["reason"] = json!(self.reason);
        }
        if let Some(details) = &self.details {
            status["details"] = (**details).clone();
        }
        status
    }
}
