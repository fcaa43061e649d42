{{/* Name of all objects of this release. */}}
{{- define "kvrelay.name" -}}
{{- if contains "kvrelay" .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-kvrelay" .Release.Name }}{{ end -}}
{{- end }}

{{- define "kvrelay.secret" -}}
{{ .Values.secret.name | default (include "kvrelay.name" .) }}
{{- end }}

{{/* What selects the pods of a role. Takes a dict: root, role. */}}
{{- define "kvrelay.selector" -}}
app.kubernetes.io/name: kvrelay
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{/* Takes a dict: root, role. */}}
{{- define "kvrelay.labels" -}}
{{ include "kvrelay.selector" . }}
app.kubernetes.io/version: {{ .root.Values.image.tag | default .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kvrelay
{{- end }}
