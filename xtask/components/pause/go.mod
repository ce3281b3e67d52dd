// The process that holds a pod's namespaces.
module knit.dev/components/pause

go 1.26.0
