// Package conformance runs the upstream conformance suite of ClusterNetworkPolicy where the kernel has no SCTP: pods get
// no container that serves it, and the tests that probe it are skipped, by name and in the report.
package conformance

import (
	"bytes"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"text/template"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/network-policy-api/apis/v1alpha2"
	upstream "sigs.k8s.io/network-policy-api/conformance"
	report "sigs.k8s.io/network-policy-api/conformance/apis/v1alpha1"
	"sigs.k8s.io/network-policy-api/conformance/tests"
	"sigs.k8s.io/network-policy-api/conformance/utils/suite"
	"sigs.k8s.io/yaml"
)

var (
	kubeconfig     = flag.String("cluster", "", "kubeconfig of the cluster")
	output         = flag.String("report-to", "", "file to write the report to")
	version        = flag.String("implementation-version", "unknown", "version of Knit, for the report")
	namespaceLabel = flag.String("namespace-label", "", "KEY=VALUE that every namespace of the suite gets")
	sctp           = flag.Bool("sctp", false, "the kernel has SCTP: run everything")
)

// firstHostPort is where the suite's own range begins. Ports are needed here because its manifest is a template.
const firstHostPort = 34345

// These probe SCTP, among others.
var probesSCTP = []string{
	"CNPAdminTierEgressSCTP", "CNPAdminTierIngressSCTP", "CNPAdminTierGress", "CNPAdminTierEgressInlineCIDRPeers",
	"CNPAdminTierEgressNodePeers", "CNPBaselineTierEgressSCTP", "CNPBaselineTierIngressSCTP", "CNPBaselineTierGress",
	"CNPBaselineTierEgressInlineCIDRPeers", "CNPBaselineTierEgressNodePeers",
}

func TestConformance(t *testing.T) {
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	must(t, err)
	cluster, err := client.New(config, client.Options{})
	must(t, err)
	set, err := kubernetes.NewForConfig(config)
	must(t, err)
	must(t, v1alpha2.Install(cluster.Scheme()))

	options := suite.Options{
		Client: cluster, ClientSet: set, KubeConfig: *config,
		CleanupBaseResources:      true,
		SupportedFeatures:         suite.AllFeatures,
		HostNetworkPortRangeStart: firstHostPort,
		HostNetworkPortRangeEnd:   firstHostPort + 7,
	}
	if key, value, found := strings.Cut(*namespaceLabel, "="); found {
		options.NamespaceLabels = map[string]string{key: value}
	}
	if !*sctp {
		options.SkipTests = probesSCTP
		known := sets.New[string]()
		for _, test := range tests.ConformanceTests {
			known.Insert(test.ShortName)
		}
		if unknown := sets.New(probesSCTP...).Difference(known); unknown.Len() > 0 {
			t.Fatalf("no tests of the suite: %v", unknown.UnsortedList())
		}
		base, err := withoutSCTP()
		must(t, err)
		// The suite reads its pods from a file that it embeds, or over HTTPS by the default client, which trusts
		// nobody's certificate but this server's from here on: nothing else of the suite uses it.
		server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(base)
		}))
		defer server.Close()
		http.DefaultClient = server.Client()
		options.BaseManifests = server.URL + "/manifests.yaml"
	}
	all, err := suite.NewConformanceProfileTestSuite(suite.ConformanceProfileOptions{
		Options: options,
		Implementation: report.Implementation{
			Organization: "knit", Project: "knit", URL: "https://knit.dev", Version: *version,
			Contact:               []string{"https://knit.dev"},
			AdditionalInformation: "cargo xtask kube test cnp",
		},
		ConformanceProfiles: sets.New(suite.CNPConformanceProfileName),
	})
	must(t, err)
	all.Setup(t)
	must(t, all.Run(t, tests.ConformanceTests))
	result, err := all.Report()
	must(t, err)
	text, err := yaml.Marshal(result)
	must(t, err)
	if *output != "" {
		must(t, os.WriteFile(*output, text, 0o644))
	}
	t.Logf("%s", text)
}

// withoutSCTP is the suite's own manifest without the containers that serve SCTP: where the kernel has none, they exit
// at once, and their pods never become ready.
func withoutSCTP() ([]byte, error) {
	text, err := upstream.Manifests.ReadFile("base/manifests.yaml")
	if err != nil {
		return nil, err
	}
	parsed, err := template.New("base").Parse(string(text))
	if err != nil {
		return nil, err
	}
	ports := make([]int, 8)
	for i := range ports {
		ports[i] = firstHostPort + i
	}
	var filled bytes.Buffer
	if err := parsed.Execute(&filled, struct{ HostNetworkPorts []int }{ports}); err != nil {
		return nil, err
	}
	var documents [][]byte
	removed := 0
	for _, document := range strings.Split(filled.String(), "\n---\n") {
		var object map[string]any
		if err := yaml.Unmarshal([]byte(document), &object); err != nil {
			return nil, err
		}
		if object["kind"] == "StatefulSet" {
			spec := object["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
			var kept []any
			for _, container := range spec["containers"].([]any) {
				if servesSCTP(container.(map[string]any)) {
					removed++
				} else {
					kept = append(kept, container)
				}
			}
			spec["containers"] = kept
		}
		stripped, err := yaml.Marshal(object)
		if err != nil {
			return nil, err
		}
		documents = append(documents, stripped)
	}
	if removed != 10 {
		return nil, fmt.Errorf("the suite has %d containers that serve SCTP; it had 10 when this was written", removed)
	}
	return bytes.Join(documents, []byte("\n---\n")), nil
}

func servesSCTP(container map[string]any) bool {
	env, _ := container["env"].([]any)
	for _, variable := range env {
		if name, _ := variable.(map[string]any)["name"].(string); strings.HasPrefix(name, "SERVE_SCTP_PORT_") {
			return true
		}
	}
	return false
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
