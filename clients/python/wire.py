"""HTTP by hand, for what an SDK would not send, and for a look at what it hides."""

import http.client
import json
import urllib.parse
import xml.etree.ElementTree as ElementTree

NAMESPACE = "{http://queue.amazonaws.com/doc/2012-11-05/}"


class Response:
    def __init__(self, response):
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def xml(self):
        return ElementTree.fromstring(self.body)

    def text(self, *path):
        """The text at a path of elements below the root, all in SQS's name space."""
        found = self.xml.find("/".join(NAMESPACE + name for name in path))
        return None if found is None else found.text

    def texts(self, *path):
        return [found.text for found in self.xml.findall("/".join(NAMESPACE + name for name in path))]


def request(endpoint, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(endpoint).netloc, timeout=30)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        return Response(connection.getresponse())
    finally:
        connection.close()


def post_form(endpoint, parameters, path="/", headers=None):
    headers = {"Content-Type": "application/x-www-form-urlencoded", **(headers or {})}
    return request(endpoint, "POST", path, urllib.parse.urlencode(parameters), headers)


def get_form(endpoint, parameters, path="/"):
    return request(endpoint, "GET", f"{path}?{urllib.parse.urlencode(parameters)}")


def post_json(endpoint, action, parameters, path="/", headers=None):
    body = parameters if isinstance(parameters, (str, bytes)) else json.dumps(parameters)
    headers = {
        "Content-Type": "application/x-amz-json-1.0",
        "X-Amz-Target": f"AmazonSQS.{action}",
        **(headers or {}),
    }
    return request(endpoint, "POST", path, body, headers)
