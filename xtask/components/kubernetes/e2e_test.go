// Package components names what the end-to-end test binary of Kubernetes needs, so that go.mod keeps it.
package components

import _ "k8s.io/kubernetes/test/e2e"
