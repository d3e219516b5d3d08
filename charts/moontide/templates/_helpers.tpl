{{- define "moontide.fullname" -}}
{{- if eq .Release.Name "moontide" -}}
moontide-operator
{{- else -}}
{{- printf "%s-moontide-operator" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "moontide.selector" -}}
app.kubernetes.io/name: moontide-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "moontide.labels" -}}
{{ include "moontide.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The rights to what the operator serves: a ClusterRole's, or a Role's in the one namespace that it watches. */}}
{{- define "moontide.rules" -}}
- apiGroups: [moontide.dev]
  resources: [kvcachepools, inferencedeployments, policyversions]
  verbs: [get, list, watch]
{{- if .Values.hook.enabled }}
# What trainers ask for through the hook, once the API server has said that they may.
- apiGroups: [moontide.dev]
  resources: [policyversions]
  verbs: [patch]
{{- end }}
- apiGroups: [moontide.dev]
  resources: [kvcachepools/status, inferencedeployments/status, policyversions/status]
  verbs: [patch]
# Some clusters ask for this of whoever sets blockOwnerDeletion. The operator writes no finalizer.
- apiGroups: [moontide.dev]
  resources: [kvcachepools/finalizers, inferencedeployments/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
# Replicas of several pods.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch, delete]
# Tokens are derived from the operator's root key, so it need not read Secrets. A patch is answered with the whole Secret to whoever
# asks for it, so this alone is a right to read every one: the policy `-reach` of admission.yaml leaves the operator's own.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, patch]
# Whether a model's claim exists.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{/* Whether the API server has ValidatingAdmissionPolicies: "true", or nothing. */}}
{{- define "moontide.hasAdmission" -}}
{{- /* Rendered without a cluster no kind is known; every release that the chart is for has this one. */ -}}
{{- $known := .Capabilities.APIVersions.Has "v1/Pod" -}}
{{- if or (not $known) (.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy") }}true{{ end -}}
{{- end -}}

{{/* Whether the policies of admission.marks are made: "true", or nothing. The values of an older release may lack it. */}}
{{- define "moontide.guardsMarks" -}}
{{- $marks := (.Values.admission | default dict).marks | default "Auto" -}}
{{- if and (include "moontide.hasAdmission" .) (or (eq $marks "On") (and (eq $marks "Auto") (not .Values.watchNamespace))) }}true{{ end -}}
{{- end -}}

{{/* Who may write any podTemplate: admission.podTemplates, with Any or PodCreators for Auto. */}}
{{- define "moontide.podTemplates" -}}
{{- $given := (.Values.admission | default dict).podTemplates | default "Auto" -}}
{{- $auto := ternary "PodCreators" "Any" (and (ne (include "moontide.hasAdmission" .) "") (not .Values.watchNamespace)) -}}
{{- ternary $auto $given (eq $given "Auto") -}}
{{- end -}}

{{/* The operator's pods, as a peer of a NetworkPolicy in any namespace. */}}
{{- define "moontide.operatorPeer" -}}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ .Release.Namespace }}
  podSelector:
    matchLabels: {{- include "moontide.selector" . | nindent 6 }}
{{- end -}}

{{/* Who shares KV in a namespace: every pod that Moontide made there, and engines that others launched. */}}
{{- define "moontide.sharers" -}}
- podSelector:
    matchLabels:
      app.kubernetes.io/managed-by: moontide
{{- with .engines }}
{{ toYaml . }}
{{- end }}
{{- end -}}
